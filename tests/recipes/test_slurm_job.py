"""recipes/slurm/job.sh with a stub in place of srun: what happens before training, and how it ends the job."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from paths_kit import ROOT
from told import Told

# Runs the command that follows its options, once, and says how that has ended, as srun does.
SRUN = """#!/bin/bash
trap : USR1
echo "srun $*" >>log
mkdir step 2>/dev/null || echo "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)" >&2
while [[ $1 == -* ]]; do shift; done
"$@"
code=$?
rmdir step
[ $code = 0 ] || echo "srun: error: n1: task 0: Exited with exit code $code" >&2
exit $code
"""
SET_UP = """echo set-up "$@" >>log; exit "${SET_UP_ENDS_WITH:-0}" """
PYTHON = """#!/bin/bash
case "$*" in
  *mingpt.launch.sick*) [ -z "$FOUND" ] || { echo "$FOUND"; sleep 0.2; } ;;
  *mingpt.preflight*) exit "${PREFLIGHT_ENDS_WITH:-0}" ;;
  *warned*) echo "python $*" >>log; kill -USR1 "$(cat job)"; sleep 1; exit 75 ;;
  *) echo "python $*" >>log ;;
esac
"""
APPTAINER = """#!/bin/bash
echo "apptainer $*" >>log
while [[ $1 != *.sif ]]; do shift; done
shift
"$@"
"""
# The job has the hosts n1 and n2, and the user has excluded n9.
SCONTROL = """#!/bin/bash
case "$*" in
  "show hostnames"*) printf 'n1\\nn2\\n' ;;
  "show node"*) [ "$3" != elsewhere ] ;;
  "show job"*) echo "   ReqNodeList=(null) ExcNodeList=n9" ;;
  *) echo "scontrol $*" >>log; [[ "$*" != "${SCONTROL_FAILS:-nothing}"* ]] ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "recipes/slurm").mkdir(parents=True)
    shutil.copy(ROOT / "recipes/slurm/job.sh", tmp_path / "recipes/slurm")
    (tmp_path / "recipes/setup.sh").write_text(SET_UP)
    programs = {"bin/srun": SRUN, "bin/scontrol": SCONTROL, "bin/squeue": "#!/bin/bash\necho 2:00\n"}
    programs |= {".venv/bin/python": PYTHON, "bin/python3": PYTHON, "bin/apptainer": APPTAINER}
    for file, content in programs.items():
        (program := tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        program.write_text(content)
        program.chmod(0o755)
    return tmp_path


START = "launch_on_all experiment=mnist --nproc-per-node=2 train.max_steps=3"
ARRAY = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NAME": "lr sweep"}
SICK = {"FOUND": "5 n2.cluster n7 elsewhere"}
SIF = {"MINGPT_CONTAINER": "/images/mingpt.sif", "SLURM_GPUS_ON_NODE": "2"}
PYXIS = {"MINGPT_CONTAINER": "registry#mingpt:1", "MINGPT_CONTAINER_MOUNTS": "/a:/b"}


def job(project: Path, start: str = START, **more: str) -> tuple[int, str, list[str]]:
    """Its exit code, what it says, and what has run, with srun's words for it."""
    env = {"PATH": f"{project}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    env |= {"SLURM_JOB_NODELIST": "n[1-2]", **more}
    command = ["bash", "-c", f". recipes/slurm/job.sh; {start}"]
    (project / "log").touch()
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stderr, (project / "log").read_text().splitlines()


@pytest.mark.parametrize(
    ("code", "start", "more"),
    [
        # Set-up is told the overrides, and where to look for options; a look, the preflight and the training follow.
        (0, START, {}),
        (0, "launch_on_all experiment=mine --config-dir 'my conf' --config-name=other -h seed=2 ~x", {}),
        (0, "train_as_tasks experiment=mnist", {}),
        # setup.sh ends with 64 for a mistake in the overrides, as each program of ours does, and with 1 for all else.
        (64, START, {"SET_UP_ENDS_WITH": "64"}),
        (70, START, {"SET_UP_ENDS_WITH": "1"}),
        (70, START, {"SET_UP_ENDS_WITH": "137"}),
        (64, START, {"PREFLIGHT_ENDS_WITH": "64"}),
        (70, START, {"PREFLIGHT_ENDS_WITH": "70"}),
        # Each task of an array has a run of its own, which may be named by its number.
        (0, "launch_on_all experiment=mnist", ARRAY),
        (0, "train_as_tasks experiment=mnist", ARRAY),
        (0, "launch_on_all run.dir=/shared/3/run", ARRAY),
        (0, "launch_on_all run.name=lr-3", ARRAY),
        (0, "launch_on_all 'run.name=lr-${oc.env:SLURM_ARRAY_TASK_ID}'", ARRAY),
        (0, "launch_on_all run.dir=s3://b/3", ARRAY),
        (64, "launch_on_all run.dir=/shared/run", ARRAY),
        (64, "train_as_tasks run.name=v13", ARRAY),
        (64, "prepare +run.dir=/a", ARRAY),  # elastic.sbatch has prepare alone
        (64, "prepare experiment=mnist", ARRAY),
        # A job leaves hosts that were found sick, but for others'. It stays held if Slurm does not take the list.
        (75, "launch_on_all", SICK),
        (75, "launch_on_all", SICK | ARRAY),
        (0, "launch_on_all", {"FOUND": "5 n7"}),
        (70, "launch_on_all", {"FOUND": "5 n2", "SCONTROL_FAILS": "update"}),
        # Containers: each step in pyxis', each program in apptainer's.
        (0, "launch_on_all experiment=mnist", PYXIS),
        (0, "train_as_tasks experiment=mnist", PYXIS),
        (0, START, SIF),
        # Steps get the environment whatever sbatch was told to export; a heterogeneous job is refused.
        (0, 'echo "$SLURM_EXPORT_ENV" >>log', {"SLURM_EXPORT_ENV": "NONE"}),
        (64, START, {"SLURM_HET_SIZE": "2"}),
    ],
    ids=str,
)
def test_what_a_job_runs_says_and_ends_with(
    code: int, start: str, more: dict[str, str], project: Path, told: Told
) -> None:
    ended, said, log = job(project, start, **more)
    assert ended == code
    told("\n".join([said, *log]), project)


def test_outside_of_slurm_the_cure_is_told(told: Told) -> None:
    command = ["bash", "recipes/slurm/train.sbatch"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | {"SLURM_SUBMIT_DIR": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 64
    told(done.stderr)


LIMITED = "echo $$ >job; launch_on_all warned=1"


@pytest.mark.parametrize(("more", "again"), [({}, "7"), (ARRAY, "5_3")])
def test_what_the_time_limit_stops_goes_back_alone(more: dict[str, str], again: str, project: Path) -> None:
    code, _, log = job(project, LIMITED, **more)
    assert (code, log[-1]) == (75, f"scontrol requeue {again}")


def test_a_time_limit_that_is_too_short_is_told_the_second_time(project: Path) -> None:
    newest = {"FOUND": "5"}  # the newest snapshot's step, before and after
    assert job(project, LIMITED, **newest)[0] == 75
    code, said, log = job(project, LIMITED, **newest)
    assert code == 64
    assert "--time (now 2:00)" in said
    assert log.count("scontrol requeue 7") == 1
    assert job(project, LIMITED, **newest)[0] == 75  # submitted again
    moving = "look() { echo x >>looked; wc -l <looked; }; "  # a new snapshot in between: the count starts again
    assert job(project, moving + LIMITED)[0] == 75
    assert job(project, LIMITED, **newest)[0] == 75
