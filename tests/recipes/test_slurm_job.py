"""recipes/slurm/job.py with a stub in place of srun: what happens before training, and how it ends the job."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.kits.paths_kit import ROOT, ran
from tests.kits.told import Told

# Runs the command that follows its options, once, and says how that has ended, as srun does.
SRUN = """#!/bin/bash
trap : USR1
echo "srun $*" >>log
mkdir step 2>/dev/null || echo "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)" >&2
while [[ $1 == -* ]]; do shift; done
"$@"
code=$?
rmdir step
[ -z "$SRUN_SAYS" ] || printf "$SRUN_SAYS" >&2
[ $code = 0 ] || echo "srun: error: n1: task 0: Exited with exit code $code" >&2
exit $code
"""
SET_UP = """echo set-up "$@" >>log; exit "${SET_UP_ENDS_WITH:-0}" """
PYTHON = """#!/bin/bash
case "$*" in
  *mingpt.launch.newest*moving=1) echo x >>looked; wc -l <looked ;;
  *mingpt.launch.newest*joining=1) echo x >>looked; wc -l <looked; echo 5 ;;  # of a node that is new, and of the run's
  *mingpt.launch.newest*) [ -z "$FOUND" ] || { echo "$FOUND"; sleep 0.2; } ;;
  *mingpt.preflight*) exit "${PREFLIGHT_ENDS_WITH:-0}" ;;
  *warned*) echo "python $*" >>log; kill -USR1 "$(cat job)"; exit 75 ;;
  *export=told) echo "SLURM_EXPORT_ENV=$SLURM_EXPORT_ENV" >>log ;;
  *) echo "python $*" >>log; exit "${TRAINING_ENDS_WITH:-0}" ;;
esac
"""
APPTAINER = """#!/bin/bash
echo "apptainer $*" >>log
while [[ $1 != *.sif ]]; do shift; done
shift
"$@"
"""
SCONTROL = """#!/bin/bash
case "$*" in
  *) echo "scontrol $*" >>log ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "recipes/slurm").mkdir(parents=True)
    for file in ("job.py", "elastic.py"):
        shutil.copy(ROOT / "recipes/slurm" / file, tmp_path / "recipes/slurm")
    (tmp_path / "recipes/setup.sh").write_text(SET_UP)
    programs = {"bin/srun": SRUN, "bin/scontrol": SCONTROL, "bin/squeue": "#!/bin/bash\necho 2:00\n"}
    programs |= {".venv/bin/python": PYTHON, "bin/python3": PYTHON, "bin/apptainer": APPTAINER}
    for file, content in programs.items():
        (program := tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        program.write_text(content)
        program.chmod(0o755)
    return tmp_path


START = "job.py launch experiment=mnist --nproc-per-node=2 train.max_steps=3"
ARRAY = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NAME": "lr sweep"}
SIF = {"MINGPT_CONTAINER": "/images/mingpt.sif", "SLURM_GPUS_ON_NODE": "2"}
PYXIS = {"MINGPT_CONTAINER": "registry#mingpt:1", "MINGPT_CONTAINER_MOUNTS": "/a:/b"}


def job(project: Path, start: str = START, **more: str) -> tuple[int, str, list[str]]:
    """Its exit code, what it says, and what has run, with srun's words for it."""
    env = {"PATH": f"{project}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    env |= {"SLURM_JOB_NODELIST": "n[1-2]", **more}
    command = ["bash", "-c", f"echo $$ >job; exec {sys.executable} recipes/slurm/{start}"]
    (project / "log").touch()
    done = ran(command, cwd=project, env=env)
    return done.returncode, done.stderr, (project / "log").read_text().splitlines()


ONE_A_NODE = "--ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --immediate=600"
EACH = "--nodes=2 --ntasks=2"
LOOKS = "--kill-on-bad-exit=0"  # a look that fails ends no other node's


def look(program: str, words: str) -> str:
    return f"srun {ONE_A_NODE} {EACH} {LOOKS} {program} {words}".rstrip()


def before(python: str, words: str, for_set_up: str) -> list[str]:
    """What runs before training: set-up is told the overrides, and where to look for options."""
    return [
        look("bash recipes/setup.sh", for_set_up),
        f"set-up {for_set_up}",
        look(f"{python} -m mingpt.launch.newest", words),
        look(f"{python} -m mingpt.preflight", words),
    ]


@pytest.mark.parametrize(
    ("start", "words", "for_set_up", "more"),
    [
        (START, "experiment=mnist --nproc-per-node=2 train.max_steps=3", "experiment=mnist train.max_steps=3", {}),
        (
            "job.py launch experiment=mine --config-dir 'my conf' --config-name=other -h seed=2 ~x",
            "experiment=mine --config-dir my conf --config-name=other -h seed=2 ~x",
            "experiment=mine --config-dir my conf --config-name=other seed=2 ~x",
            {},
        ),
        ("job.py tasks experiment=mnist", "experiment=mnist", "", {}),
        # Each task of an array has a run of its own, which may be named by its number.
        ("job.py launch experiment=mnist", "experiment=mnist run.name=lr-sweep-3", "", ARRAY),
        ("job.py tasks experiment=mnist", "experiment=mnist run.name=lr-sweep-3", "", ARRAY),
        ("job.py launch run.dir=/shared/3/run", "run.dir=/shared/3/run", "", ARRAY),
        (
            "job.py launch 'run.name=lr-${oc.env:SLURM_ARRAY_TASK_ID}'",
            "run.name=lr-${oc.env:SLURM_ARRAY_TASK_ID}",
            "",
            ARRAY,
        ),
        # The variables of all recipes, then the arguments. A quote is Hydra's; a space within does not divide.
        (
            "job.py launch seed=2",
            r"experiment=mnist run.dir='/a b\'s' a='x y' b=[1,2] seed=2",
            "",
            {"EXPERIMENT": "mnist", "RUN_DIR": "/a b's", "OVERRIDES": "a='x y'  b=[1,2] "},
        ),
    ],
    ids=str,
)
def test_what_a_job_runs(start: str, words: str, for_set_up: str, more: dict[str, str], project: Path) -> None:
    """Set-up, a look at the run, the preflight, and the training. for_set_up: empty if it gets the same words."""
    python, how = f"{project}/.venv/bin/python", start.split()[1]
    module = {"launch": "mingpt.launch", "tasks": "mingpt.train"}[how]
    each = {"launch": f"{ONE_A_NODE} {EACH}", "tasks": "--kill-on-bad-exit=1"}[how]
    trained = [f"srun {each} {python} -m {module} {words}", f"python -m {module} {words}"]
    assert job(project, start, **more) == (0, "", [*before(python, words, for_set_up or words), *trained])


def test_a_start_again_has_steps_with_numbers_of_their_own(project: Path) -> None:
    """A start has at most four until it trains; the second one begins after eight of them."""
    _, _, first = job(project)
    _, _, third = job(project, SLURM_RESTART_COUNT="2")
    number = len([line for line in first if line.startswith("srun")])
    assert number == 4
    assert third == [*first, *[f"srun {ONE_A_NODE} --nodes=1 --ntasks=1 true"] * 2 * number, *first]


@pytest.mark.parametrize("how", ["launch", "tasks"])
def test_each_step_is_in_pyxis_container(how: str, project: Path) -> None:
    container = f"--container-image=registry#mingpt:1 --container-mounts={project}:{project},/a:/b"
    container += f" --container-workdir={project}"
    of_train = f"{ONE_A_NODE} {container} {EACH}" if how == "launch" else f"--kill-on-bad-exit=1 {container}"
    module = {"launch": "mingpt.launch", "tasks": "mingpt.train"}[how]
    steps = dict.fromkeys(("mingpt.launch.newest", "mingpt.preflight"), f"{ONE_A_NODE} {container} {EACH} {LOOKS}")
    words = "experiment=mnist"
    log = [f"srun {options} python3 -m {name} {words}" for name, options in {**steps, module: of_train}.items()]
    assert job(project, f"job.py {how} {words}", **PYXIS) == (0, "", [*log, f"python -m {module} {words}"])


def test_each_program_is_in_apptainers_container(project: Path) -> None:
    inside = f"apptainer exec --bind {project}:{project} --pwd {project} --nv /images/mingpt.sif python3"
    words = START.removeprefix("job.py launch ")
    log = list[str]()
    for module in ("mingpt.launch.newest", "mingpt.preflight"):
        log += [look(f"{inside} -m {module}", words), f"{inside} -m {module} {words}"]
    trains = f"{inside} -m mingpt.launch {words}"
    log += [f"srun {ONE_A_NODE} {EACH} {trains}", trains, f"python -m mingpt.launch {words}"]
    assert job(project, **SIF) == (0, "", log)


def test_steps_get_the_environment_whatever_sbatch_was_told_to_export(project: Path) -> None:
    code, _, log = job(project, "job.py launch export=told", SLURM_EXPORT_ENV="NONE")
    assert (code, log[-1]) == (0, "SLURM_EXPORT_ENV=ALL")


@pytest.mark.parametrize(
    ("code", "start", "more", "steps"),
    [
        # setup.sh ends with 64 for a mistake in the overrides, as each program of ours does, and with 1 for all else.
        (64, START, {"SET_UP_ENDS_WITH": "64"}, 1),
        (70, START, {"SET_UP_ENDS_WITH": "1"}, 1),
        (64, START, {"PREFLIGHT_ENDS_WITH": "64"}, 3),
        (70, START, {"PREFLIGHT_ENDS_WITH": "70"}, 3),
        (64, "job.py tasks run.name=v13", ARRAY, 0),
        (64, "elastic.py +run.dir=/a", ARRAY, 0),  # which gives none a run of its own
        (64, START, {"SLURM_HET_SIZE": "2"}, 0),
        (64, "job.py launch", {"OVERRIDES": "run.name='a"}, 0),
    ],
    ids=str,
)
def test_a_job_that_does_not_train_says_why(
    code: int, start: str, more: dict[str, str], steps: int, project: Path, told: Told
) -> None:
    ended, said, log = job(project, start, **more)
    assert (ended, sum(line.startswith("srun") for line in log)) == (code, steps)
    told(said, project)


FIRST_MISTAKE = """srun: error: n2: task 1: Exited with exit code 75
srun: error: n1: tasks 0,2-3: Exited with exit code 64"""


@pytest.mark.parametrize(
    ("code", "srun", "says"),
    [
        (0, 0, ""),
        (64, 75, FIRST_MISTAKE),
        (70, 75, "srun: error: n1: task 0: Exited with exit code 70"),
        (75, 75, "n1: task 0: Exited with exit code 64"),  # a program's own line
        (70, 143, ""),
        (70, 1, "srun: error: n1: task 0: Killed"),
    ],
)
def test_the_code_of_a_job_is_not_always_the_highest(code: int, srun: int, says: str, project: Path) -> None:
    ended, said, log = job(project, TRAINING_ENDS_WITH=str(srun), SRUN_SAYS=f"{says}\\n" if says else "")
    assert (ended, log[-1].split()[:3]) == (code, ["python", "-m", "mingpt.launch"])
    assert says in said


def test_an_old_python_is_told(told: Told) -> None:
    program = f"import runpy, sys; sys.version_info = (3, 6, 8); runpy.run_path('{ROOT}/recipes/slurm/job.py')"
    done = ran([sys.executable, "-c", program])
    assert done.returncode == 64
    told(done.stderr, sys.executable)


def test_outside_of_slurm_the_cure_is_told(told: Told) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")} | {"SLURM_SUBMIT_DIR": str(ROOT)}
    ended = [ran(["bash", script], cwd=ROOT, env=env) for script in (ROOT / "recipes/slurm").glob("*.sbatch")]
    [(code, said)] = {(done.returncode, done.stderr) for done in ended}
    assert code == 64
    told(said)


LIMITED = "job.py launch warned=1"


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
    assert job(project, f"{LIMITED} moving=1")[0] == 75  # a new snapshot in between: the count starts again
    assert job(project, LIMITED, **newest)[0] == 75


def test_what_one_node_knows_of_the_run_is_no_new_snapshot(project: Path) -> None:
    """The run is on another node's disk: the first one learns its step only when it has joined."""
    assert [job(project, f"{LIMITED} joining=1")[0] for _ in range(2)] == [75, 64]


# --- elastic.py: a job of two nodes, n1 with two GPUs of its own kind and n2 with one ---

# The first node's launcher waits until the other node's, or its stand-in, has been there.
ELASTIC = {
    ".venv/bin/python": """#!/bin/bash
echo "python $*" >>log
eval "$PYTHON_FIRST"
case "$*" in
  *--node-rank=1*) touch there; exit "${SECOND_ENDS_WITH:-75}" ;;
  *--node-rank=0*)
    for i in {1..300}; do [ ! -e there ] || break; sleep 0.1; done
    sleep 0.5; exit "${FIRST_ENDS_WITH:-75}" ;;
esac
""",
    "bin/srun": """#!/bin/bash
echo "srun $*" >>log
case "$*" in *SLURM_NODEID*) printf '0 n1 8 2\\n1 n2 4 1\\n'; exit ;; esac
while [[ $1 == -* ]]; do shift; done
exec "$@"
""",
    "bin/scontrol": """#!/bin/bash
case "$*" in
  "show hostnames"*) printf "${HOSTS:-n1 n2}" ;;
  "show job"*)
    printf '  GRES=gpu:L4:2(IDX:0-1)\\n  GRES=gpu:L4:1(IDX:0)\\n'
    printf '   StdErr=/e 1\\n   StdIn=/dev/null\\n   StdOut=/o 1\\n' ;;
esac
""",
    "bin/squeue": """#!/bin/bash
case "$*" in *%L) echo 1:00:00 ;; *%N) echo "n[1-2]" ;; *'%n|%f') echo "$ASKED|(null)" ;; *%B) echo n1 ;; esac
""",
    "bin/sbatch": """#!/bin/bash
echo "sbatch $*" >>log
[ -z "$MINGPT_RDZV_SECRET" ] || echo "SLOT=$SLOT $(compgen -e SLURM_)" >>log
touch there; exit 64
""",
    "bin/scancel": """#!/bin/bash
echo "scancel $*" >>log
""",
}
NODE = {"SLURM_JOB_NAME": "elastic", "SLURM_JOB_USER": "me", "SLURMD_NODENAME": "n1", "SLURM_JOB_PARTITION": "all"}
NODE |= {"SLURM_GPUS": "3", "SLURM_MEM_PER_NODE": "2048", "SLURM_CONF": "/etc/slurm.conf", "MINGPT_PREFLIGHT": "0"}
ONCE = "srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --immediate=600 --nodes=1 --ntasks=1 "
ONCE += "--kill-on-bad-exit=0"
SHARED = "--rdzv-endpoint=n1:10127 --rdzv-id=slurm-7 experiment=mnist seed=1"


def elastic(project: Path, **more: str) -> tuple[int, str, list[str]]:
    for file, content in ELASTIC.items():
        (project / file).write_text(content)
        (project / file).chmod(0o755)
    return job(project, "elastic.py seed=1", **NODE, EXPERIMENT="mnist", **more)


def test_elastic_starts_a_launcher_on_each_node(project: Path) -> None:
    code, said, log = elastic(project)
    assert (code, said) == (75, "")
    assert f"python -m mingpt.launch --nnodes=1:2 --node-rank=0 {SHARED}" in log
    assert f"python -m mingpt.launch --nnodes=1:2 --node-rank=1 {SHARED}" in log
    steps = [line.partition("/")[0] for line in log if line.startswith(ONCE)]
    assert sorted(steps)[-2:] == [f"{ONCE} --nodelist=n1 --gpus=2 ", f"{ONCE} --nodelist=n2 --gpus=1 "]
    scancel = "scancel --quiet --user=me --name=elastic+7"
    assert (log[0], log[-1], log.count(scancel)) == (scancel, scancel, 2)


@pytest.mark.parametrize(("asked", "node"), [("", ""), ("n[1-2]", "--nodelist=n2 ")])
def test_elastic_submits_a_stand_in_for_a_lost_node(asked: str, node: str, project: Path) -> None:
    code, said, log = elastic(project, HOSTS="n1", ASKED=asked, FIRST_ENDS_WITH="0")
    assert (code, said) == (0, "")
    assert (
        "sbatch --wait --quiet --export=ALL --nodes=1 --no-requeue --job-name=elastic+7 --partition=all "
        f"--cpus-per-task=4 --time=1:00:00 --gpus-per-node=L4:1 {node}--error=/e 1 --output=/o 1 --mem=2048 "
        "recipes/slurm/elastic.sbatch experiment=mnist seed=1"
    ) in log
    assert "SLOT=1 SLURM_CONF" in log  # of Slurm's variables, a secret in the environment


def test_a_job_that_is_cancelled_cancels_its_stand_ins(project: Path) -> None:
    stop = 'case "$*" in *--node-rank=0*) kill -TERM "$(cat job)"; exit 75 ;; esac'
    code, _, log = elastic(project, PYTHON_FIRST=stop)
    assert (code, log.count("scancel --quiet --user=me --name=elastic+7")) == (143, 2)  # at the start and at the end


@pytest.mark.parametrize(("head", "code"), [("n1", 75), ("n2", 0)])
def test_a_stand_in_trains_while_its_job_runs(head: str, code: int, project: Path) -> None:
    told = {"HEAD_JOB": "6", "HEAD": head, "SLOT": "1", "PORT": "10127", "MIN_NODES": "1", "MAX_NODES": "2"}
    ended, _, log = elastic(project, **told)
    trained = f"python -m mingpt.launch --nnodes=1:2 --node-rank=1 {SHARED.replace('n1:', f'{head}:')}"
    assert ended == code
    assert (trained.replace("slurm-7", "slurm-6") in log) == (code == 75)


def test_a_launcher_that_crashed_starts_again_where_it_was(project: Path) -> None:
    """Soon, by the program that stays there."""
    program = "#!/bin/bash\necho x >>starts; [ $(wc -l <starts) = 2 ] && exit 75; exit 70\n"
    (project / "launcher").write_text(program)
    (project / "sitecustomize.py").write_text("import time\nsleep = time.sleep\ntime.sleep = lambda s: sleep(s / 99)\n")
    command = [sys.executable, "recipes/slurm/elastic.py", "stay", "bash", "launcher"]
    done = ran(command, cwd=project, env=os.environ | {"HEAD": "n1", "HEAD_JOB": "7", "PYTHONPATH": str(project)})
    assert (done.returncode, (project / "starts").read_text()) == (75, "x\nx\n")
