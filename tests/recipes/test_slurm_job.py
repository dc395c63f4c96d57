"""recipes/slurm/job.sh with a stub in place of srun: what happens before training, and how it ends the job."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from paths_kit import ROOT

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
SET_UP = """echo "set-up $*" >>log; exit "$SET_UP_ENDS_WITH" """
PYTHON = """#!/bin/bash
case "$*" in
  *mingpt.launch.sick*) ! cat found 2>/dev/null || sleep 0.2 ;;
  *mingpt.preflight*) exit "$PREFLIGHT_ENDS_WITH" ;;
  *warned*) echo "python $*" >>log; kill -USR1 "$(cat job)"; sleep 1; exit 75 ;;
  *) echo "python $*" >>log ;;
esac
"""
# The job has the hosts n1 and n2, and the user has excluded n9.
SCONTROL = """#!/bin/bash
case "$*" in
  "show hostnames"*) printf 'n1\\nn2\\n' ;;
  "show node"*) [ "$3" != elsewhere ] ;;
  "show job"*) echo "   ReqNodeList=(null) ExcNodeList=n9" ;;
  *) echo "scontrol $*" >>log; [[ "$*" != "$SCONTROL_FAILS"* ]] ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "recipes/slurm").mkdir(parents=True)
    shutil.copy(ROOT / "recipes/slurm/job.sh", tmp_path / "recipes/slurm")
    (tmp_path / "recipes/setup.sh").write_text(SET_UP)
    for file, content in (("bin/srun", SRUN), ("bin/scontrol", SCONTROL), (".venv/bin/python", PYTHON)):
        (program := tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        program.write_text(content)
        program.chmod(0o755)
    return tmp_path


START = "launch_on_all experiment=mnist --nproc-per-node=2 train.max_steps=3"


def job(
    project: Path, set_up: int = 0, preflight: int = 0, start: str = START, more: Mapping[str, str] | None = None
) -> tuple[int, str, list[str]]:
    """Its exit code, what it says, and what has run, with srun's words for it."""
    env = {"PATH": f"{project}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    env |= {"SET_UP_ENDS_WITH": str(set_up), "PREFLIGHT_ENDS_WITH": str(preflight)}
    env |= {"SLURM_JOB_NODELIST": "n[1-2]", "SCONTROL_FAILS": "nothing", **(more or {})}
    command = ["bash", "-c", f". recipes/slurm/job.sh; {start}"]
    (project / "log").touch()
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stderr, (project / "log").read_text().splitlines()


def test_set_up_is_told_the_overrides_and_training_follows(project: Path) -> None:
    code, said, log = job(project)
    assert (code, said) == (0, "")
    assert log[1] == "set-up experiment=mnist train.max_steps=3"
    assert log[-1] == "python -m mingpt.launch experiment=mnist --nproc-per-node=2 train.max_steps=3"


def test_a_step_begins_when_the_one_before_has_ended_and_waits_for_nodes_no_longer_than_ten_minutes(
    project: Path,
) -> None:
    (project / "found").write_text("10\n")
    code, said, log = job(project)
    assert (code, said) == (0, "")
    steps = [line for line in log if line.startswith("srun")]
    assert len(steps) == 4  # set-up, a look, the preflight, the training
    assert all(" --immediate=600 " in step for step in steps)


def test_set_up_looks_for_options_where_training_does(project: Path) -> None:
    start = "launch_on_all experiment=mine --config-dir 'my conf' --nproc-per-node=2 --config-name=other -h seed=2 ~x"
    code, said, log = job(project, start=start)
    assert (code, said) == (0, "")
    assert log[1] == "set-up experiment=mine --config-dir my conf --config-name=other seed=2 ~x"


def test_outside_of_slurm_the_cure_is_told() -> None:
    command = ["bash", "recipes/slurm/train.sbatch"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | {"SLURM_SUBMIT_DIR": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (64, "error: this is no job of Slurm's: start it with sbatch\n")


# setup.sh ends with 64 for a mistake in the overrides, as each program of ours does, and with 1 for all else.
@pytest.mark.parametrize(("ended", "code"), [(64, 64), (1, 70), (137, 70)])
def test_a_mistake_that_set_up_finds_is_one_and_all_else_may_be_tried_again(
    ended: int, code: int, project: Path
) -> None:
    ends_with, said, log = job(project, set_up=ended)
    assert ends_with == code
    assert said.splitlines()[-1].startswith(f"error: set-up failed (exit code {ended}; the reason is above)")
    assert [line for line in log if line.startswith("python")] == []
    # One node's 64 must not be hidden by the signal that would end the others: srun returns the highest code.
    assert "--kill-on-bad-exit=0" in log[0].split()[log[0].split().index("--kill-on-bad-exit=1") :]


@pytest.mark.parametrize(("ended", "code"), [(64, 64), (70, 70)])
def test_so_is_one_that_preflight_finds(ended: int, code: int, project: Path) -> None:
    ends_with, said, log = job(project, preflight=ended)
    assert ends_with == code
    assert "preflight: the nodes can't train as they are" in said
    assert [line for line in log if line.startswith("python")] == []


ARRAY = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NAME": "lr sweep"}


@pytest.mark.parametrize("how", ["launch_on_all", "train_as_tasks"])
def test_each_task_of_an_array_has_a_run_of_its_own(how: str, project: Path) -> None:
    code, _, log = job(project, start=f"{how} experiment=mnist", more=ARRAY)
    assert code == 0
    assert log[-1].endswith(" experiment=mnist run.name=lr-sweep-3")
    assert "set-up experiment=mnist run.name=lr-sweep-3" in log


@pytest.mark.parametrize(
    "given",
    ["run.dir=/shared/3/run", "run.name=lr-3", "run.name=lr-${oc.env:SLURM_ARRAY_TASK_ID}", "run.dir=s3://b/3"],
)
def test_the_run_of_an_arrays_task_may_be_named_by_its_number(given: str, project: Path) -> None:
    code, _, log = job(project, start=f"launch_on_all '{given}'", more=ARRAY)
    assert (code, log[-1]) == (0, f"python -m mingpt.launch {given}")


@pytest.mark.parametrize("start", ["launch_on_all", "train_as_tasks", "prepare"])  # elastic.sbatch has prepare alone
@pytest.mark.parametrize("given", ["run.dir=/shared/run", "run.name=v13", "+run.dir=/a"])
def test_one_run_for_all_tasks_of_an_array_is_refused(start: str, given: str, project: Path) -> None:
    code, said, log = job(project, start=f"{start} experiment=mnist {given}", more=ARRAY)
    assert (code, log) == (64, [])
    assert said == (
        f"error: {given}: all tasks of this array would train in one run, and end each other: give each its own, "
        "such as 'run.name=mine-${oc.env:SLURM_ARRAY_TASK_ID}'\n"
    )


def test_an_arrays_elastic_job_must_be_told_its_run(project: Path) -> None:
    code, said, log = job(project, start="prepare experiment=mnist", more=ARRAY)
    assert (code, log) == (64, [])
    assert said.startswith("error: no run.name or run.dir: all tasks of this array would train in one run")


@pytest.mark.parametrize(("more", "again"), [({}, "7"), (ARRAY, "5_3")])
def test_what_the_time_limit_stops_goes_back_alone(more: dict[str, str], again: str, project: Path) -> None:
    code, _, log = job(project, start="echo $$ >job; launch_on_all warned=1", more=more)
    assert (code, log[-1]) == (75, f"scontrol requeue {again}")


LIMITED = "echo $$ >job; launch_on_all warned=1"


def test_a_time_limit_that_is_too_short_is_told_the_second_time(project: Path) -> None:
    (project / "found").write_text("5\n")  # the newest snapshot's step, before and after
    (project / "bin/squeue").write_text("#!/bin/bash\necho 2:00\n")
    (project / "bin/squeue").chmod(0o755)
    assert job(project, start=LIMITED)[0] == 75
    code, said, log = job(project, start=LIMITED)
    assert code == 64
    assert said.splitlines()[-1] == (
        "error: the time limit came before the first new snapshot, twice: submit again with a longer --time (now 2:00)"
    )
    assert log.count("scontrol requeue 7") == 1
    assert job(project, start=LIMITED)[0] == 75  # submitted again


def test_a_new_snapshot_in_between_starts_the_count_again(project: Path) -> None:
    (project / "found").write_text("5\n")
    assert job(project, start=LIMITED)[0] == 75
    moving = "look() { echo x >>looked; wc -l <looked; }; "
    assert job(project, start=moving + LIMITED)[0] == 75
    assert job(project, start=LIMITED)[0] == 75


@pytest.mark.parametrize(("more", "again"), [({}, "7"), (ARRAY, "5_3")])
def test_a_job_leaves_hosts_that_were_found_sick(more: dict[str, str], again: str, project: Path) -> None:
    (project / "found").write_text("5 n2.cluster n7 elsewhere\n")
    code, said, log = job(project, start="launch_on_all", more=more)
    assert code == 75
    assert said.startswith("error: sick hosts, by run.dir/sick-hosts: n2: the job goes back into the queue")
    assert log[-3:] == [
        f"scontrol requeuehold {again}",
        f"scontrol update JobId={again} ExcNodeList=n9,n2,n7",
        f"scontrol release {again}",
    ]


def test_it_stays_held_if_slurm_does_not_take_the_list(project: Path) -> None:
    (project / "found").write_text("5 n2\n")
    code, said, log = job(project, more={"SCONTROL_FAILS": "update"})
    assert (code, log[-1]) == (70, "scontrol update JobId=7 ExcNodeList=n9,n2")
    assert "Slurm did not take the list" in said


def test_sick_hosts_of_others_disturb_nobody(project: Path) -> None:
    (project / "found").write_text("5 n7\n")
    assert job(project)[0] == 0


def container(project: Path, image: str, start: str = START, **more: str) -> tuple[int, str, list[str]]:
    apptainer = '#!/bin/bash\necho "apptainer $*" >>log; while [[ $1 != *.sif ]]; do shift; done; shift; "$@"\n'
    for name, content in (("apptainer", apptainer), ("python3", PYTHON)):
        (project / "bin" / name).write_text(content)
        (project / "bin" / name).chmod(0o755)
    return job(project, start=start, more={"MINGPT_CONTAINER": image, **more})


@pytest.mark.parametrize("how", ["launch_on_all", "train_as_tasks"])
def test_pyxis_runs_each_step_in_the_container(how: str, project: Path) -> None:
    code, said, log = container(
        project, "registry#mingpt:1", f"{how} experiment=mnist", MINGPT_CONTAINER_MOUNTS="/a:/b"
    )
    assert (code, said) == (0, "")
    steps = [line for line in log if line.startswith("srun")]
    assert len(steps) == 3  # a look, the preflight, the training; no set-up
    for step in steps:
        assert f" --container-image=registry#mingpt:1 --container-mounts={project}:{project},/a:/b " in step
        assert f" --container-workdir={project} " in step
    assert log[-1].endswith(" experiment=mnist")


def test_apptainer_runs_each_program_in_the_container(project: Path) -> None:
    code, said, log = container(project, "/images/mingpt.sif", SLURM_GPUS_ON_NODE="2")
    assert (code, said) == (0, "")
    inside = [line for line in log if line.startswith("apptainer")]
    assert len(inside) == 3
    start = f"apptainer exec --bind {project}:{project} --pwd {project} --nv /images/mingpt.sif python3 -m mingpt."
    assert all(line.startswith(start) for line in inside)
    assert log[-1] == "python -m mingpt.launch experiment=mnist --nproc-per-node=2 train.max_steps=3"


def test_a_heterogeneous_job_is_refused(project: Path) -> None:
    code, said, log = job(project, more={"SLURM_HET_SIZE": "2"})
    assert (code, log) == (64, [])
    assert said.startswith("error: SLURM_HET_SIZE=2: a heterogeneous job can't train in one run: ask for all nodes")


def test_steps_get_the_environment_whatever_sbatch_was_told_to_export(project: Path) -> None:
    assert job(project, start='echo "$SLURM_EXPORT_ENV" >>log', more={"SLURM_EXPORT_ENV": "NONE"})[2][-1] == "ALL"
