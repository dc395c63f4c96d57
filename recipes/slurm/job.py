"""What this folder's scripts run on a job's first node: it prepares the nodes, trains on them, and requeues the job.

    python3 recipes/slurm/job.py launch|tasks [Hydra's overrides, options of mingpt.launch]

launch: mingpt.launch on each node, which starts one process per GPU. tasks: mingpt.train as each of the job's tasks.
The system's Python runs this, 3.9 or newer, without packages.
"""

import os
import re
import signal
import subprocess
import sys
from typing import NoReturn

# An older Python reads the file this far, if the rest is of its syntax, too: no ":=", no match, no X | Y.
if sys.version_info < (3, 9):  # noqa: UP036
    print(
        f"error: {sys.executable} is Python {sys.version_info[0]}.{sys.version_info[1]}, and this script needs 3.9 or "
        f"newer: edit the `module load` line of the script that you submit",
        file=sys.stderr,
    )
    sys.exit(64)

# srun, with one task on each node, which gets everything that the job has there, however many tasks the job was
# submitted with. srun would take the variables as options, and divide CPUs and GPUs among tasks that don't exist.
# --immediate: seconds until srun gives up waiting for nodes that "are busy". After a requeue Slurm may have lost one.
ONCE_A_NODE = [
    *("env", "-u", "SLURM_NTASKS", "-u", "SLURM_NPROCS", "-u", "SLURM_NTASKS_PER_NODE", "-u", "SLURM_CPUS_PER_TASK"),
    *("-u", "SLURM_GPUS_PER_TASK", "srun"),
    *("--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=1", "--immediate=600"),
]
STEPS = 4  # of one start, until the one that trains has a number: set-up, a look at the run, the preflight, training
PROJECT = os.environ.get("PWD") or os.getcwd()  # not resolved: the nodes see it by this name
# OVERRIDES ends a word at a space outside of quotes. The quotes are Hydra's, and stay.
WORD = re.compile(r"""(?:[^\s'"]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")+""")
EXITED = re.compile(rb"srun: error: .* tasks? [0-9,-]+: Exited with exit code (64|70)\s*")


def complain(line: str) -> None:
    print(f"error: {line}", file=sys.stderr, flush=True)


def fail(line: str, code: int = 64) -> NoReturn:
    complain(line)
    sys.exit(code)


def call(*command: str) -> int:
    """Runs a command and returns its exit code; 128 and the signal's number if a signal has ended it."""
    code = subprocess.call(command)
    return code if code >= 0 else 128 - code


def ask(*command: str, limit: float = 60) -> str:
    """What a command prints within a limit in seconds, else ""."""
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit).stdout.strip()
    except subprocess.TimeoutExpired as error:
        complain(str(error))
        return ""


def hostnames(nodes: str) -> list[str]:
    return ask("scontrol", "show", "hostnames", nodes).split()


def read_arguments(given: list[str]) -> list[str]:
    """What the variables of all recipes say, as arguments; then those that were given.

    The variables are gone afterwards, since recipes/setup.sh and a job that stands in for a lost node read them, too.
    """
    names = ("EXPERIMENT", "RUN_DIR", "OVERRIDES")
    experiment, run_dir, overrides = (os.environ.pop(name, "").strip() for name in names)
    if WORD.sub("", overrides).strip():
        fail("OVERRIDES: a quote is not closed: close it, or leave it out")  # a value may be secret
    named = [f"experiment={experiment}"] if experiment else []
    if run_dir:
        quoted = run_dir.replace("\\", "\\\\").replace("'", "\\'")
        named.append(f"run.dir='{quoted}'")
    return [*named, *WORD.findall(overrides), *given]


def find_run(arguments: list[str]) -> str:
    """The last argument that sets the run's place or name, or ""."""
    named = [word for word in arguments if re.match(r"(\+\+|\+)?run\.(dir|name)=", word)]
    return named[-1] if named else ""


def refuse_one_run_for_all(task: str, arguments: list[str]) -> None:
    """Exits if the tasks of an array would share a run; each would end the others."""
    run = find_run(arguments) or "no run.name or run.dir"
    if "SLURM_ARRAY_TASK_ID" not in run and not re.search(rf"(?<![0-9]){task}(?![0-9])", run):
        fail(
            f"{run}: all tasks of this array would train in one run, and end each other: give each its own, such as "
            f"'run.name=mine-${{oc.env:SLURM_ARRAY_TASK_ID}}'"
        )


def of_set_up(arguments: list[str]) -> list[str]:
    """Hydra's overrides and the options that name its files: set-up does not take the launcher's other options."""
    chosen, value_follows = [], False
    for word in arguments:
        option = not value_follows and word in ("--config-dir", "--config-name", "--config-path", "-cd", "-cn", "-cp")
        if option or value_follows or re.match(r"--config-.*=|[^-].*=|~", word, re.DOTALL):
            chosen.append(word)
        value_follows = option
    return chosen


def remove(file: str) -> None:
    if os.path.exists(file):
        os.remove(file)


def read_container() -> tuple[list[str], list[str]]:
    """srun's options, and the command that Python follows, of MINGPT_CONTAINER=image.

    A .sif file or a docker:// address is apptainer's; all else is pyxis', whose options srun takes. Both see this
    folder, and what MINGPT_CONTAINER_MOUNTS names: FROM:TO,…
    """
    image, more = os.environ.get("MINGPT_CONTAINER", ""), os.environ.get("MINGPT_CONTAINER_MOUNTS", "")
    mounts = f"{PROJECT}:{PROJECT}{',' if more else ''}{more}"
    if not image:
        return [], []
    if not image.endswith(".sif") and "://" not in image:
        named = {"image": image, "mounts": mounts, "workdir": PROJECT}
        return [f"--container-{name}={value}" for name, value in named.items()], []
    gpus = ["--nv"] if os.environ.get("SLURM_GPUS_ON_NODE", "0") != "0" else []
    return [], ["apptainer", "exec", "--bind", mounts, "--pwd", PROJECT, *gpus, image]


class Job:
    """This job, by Slurm's variables, and what is to be trained in it."""

    def __init__(self, arguments: list[str], own_run: bool = True) -> None:
        """own_run: a task of an array whose arguments name no run has its own, named by the task's number."""
        if not os.environ.get("SLURM_JOB_NUM_NODES"):
            fail("this is no job of Slurm's: start it with sbatch")
        # Each component has its own list of nodes and its own ranks, so each would train alone.
        size = os.environ.get("SLURM_HET_SIZE") or "1"
        if int(size) > 1:
            fail(
                f"SLURM_HET_SIZE={size}: a heterogeneous job can't train in one run: ask for all nodes in one "
                f"component (they may differ in GPUs: --nodes=3 --gpus=6), without ':' in sbatch's options"
            )
        # sbatch --export=NONE makes srun, too, pass nothing on, of what this script sets for its steps.
        os.environ["SLURM_EXPORT_ENV"] = "ALL"
        self.id, self.nodes = os.environ["SLURM_JOB_ID"], int(os.environ["SLURM_JOB_NUM_NODES"])
        self.name = os.environ.get("SLURM_JOB_NAME") or "run"
        self.arguments = read_arguments(arguments)
        self.me = self.id  # as scontrol knows it
        task = os.environ.get("SLURM_ARRAY_TASK_ID")
        if task:
            self.me = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"  # by the job's id alone, Slurm may take all tasks
            if own_run and not find_run(self.arguments):  # Slurm gives all tasks the same arguments
                self.arguments.append(f"run.name={re.sub('[^A-Za-z0-9._-]', '-', self.name)}-{task}")
            refuse_one_run_for_all(task, self.arguments)

        self.srun_options, self.container = read_container()
        self.on_all = [*ONCE_A_NODE, *self.srun_options, f"--nodes={self.nodes}", f"--ntasks={self.nodes}"]
        per_task = os.environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2]
        if per_task:  # a step with fewer tasks would get fewer GPUs
            self.on_all.append(f"--gpus={int(per_task) * int(os.environ['SLURM_NTASKS'])}")

        self.python: list[str] = []
        self.before = "none"  # the newest snapshot's step before this job trains; "unknown": the store did not answer
        self.warned: list[int] = []  # the signals of the warning
        self.step: list[subprocess.Popen[bytes]] = []  # the one that trains
        # Slurm's warning before the time limit (#SBATCH --signal=B:USR1@…) comes to this process alone.
        signal.signal(signal.SIGUSR1, self.pass_warning_on)

    def pass_warning_on(self, number: int, _: object) -> None:
        self.warned.append(number)
        for step in self.step:
            step.send_signal(signal.SIGUSR1)

    def prepare(self, preflight: bool = True) -> None:
        """Sets up the nodes, then runs the preflight. Exits if one of them fails."""
        self.leave_out_old_numbers()
        self.python = self.find_python()
        os.environ.setdefault("PYTHONUNBUFFERED", "1")
        os.environ.setdefault("NCCL_DEBUG", "WARN")
        self.before = self.look()
        if not preflight or os.environ.get("MINGPT_PREFLIGHT") == "0":
            return
        # =0: each node prints what it found, and has time limits of its own.
        command = [*self.on_all, "--kill-on-bad-exit=0", *self.python, "-m", "mingpt.preflight", *self.arguments]
        code = call(*command)
        if code:
            why = "preflight: the nodes can't train as they are (MINGPT_PREFLIGHT=0 leaves this check out)"
            fail(why, 64 if code == 64 else 70)

    def leave_out_old_numbers(self) -> None:
        """Makes the numbers of this start's steps others than those of earlier starts of the job.

        Slurm counts them from 0 at each start. A node that was lost and comes back still runs the srun of an earlier
        start, which sees its tasks end and then ends its step, by number: that would be the step that trains now.
        """
        for _ in range(STEPS * int(os.environ.get("SLURM_RESTART_COUNT") or "0")):
            call(*ONCE_A_NODE, "--nodes=1", "--ntasks=1", "true")

    def find_python(self) -> list[str]:
        """MINGPT_PYTHON (a program, or the folder of an environment), or the environment that set-up makes."""
        named = os.environ.get("MINGPT_PYTHON", "")
        if self.container or self.srun_options:
            return [*self.container, named or "python3"]
        if named:
            program = f"{named}/bin/python" if os.path.isdir(named) else named
            if not os.access(program, os.X_OK):
                fail(f"MINGPT_PYTHON={named}: there is no such program or environment")
            return [program]
        # =0: each node finds a user error by itself. A signal to the others would give a higher code, srun's own.
        command = [*self.on_all, "--kill-on-bad-exit=0", "bash", "recipes/setup.sh", *of_set_up(self.arguments)]
        code = call(*command)
        if code:
            cure = "correct that, or name an environment that is ready: MINGPT_PYTHON"
            fail(f"set-up failed (exit code {code}; the reason is above): {cure}", 64 if code == 64 else 70)
        return [f"{PROJECT}/.venv/bin/python"]

    def look(self) -> str:
        """The step of the run's newest snapshot; "unknown": the store did not answer.

        A mistake in the arguments is told later, by what trains. At the end the time limit is near when this is asked.
        """
        limit = ["timeout", "-k", "5", "30"]
        # All nodes: one alone may have the run on its disk, and a node that is new to the run knows no step of it yet.
        command = [*self.on_all, "--kill-on-bad-exit=0", *self.python, "-m", "mingpt.launch.newest"]
        done = subprocess.run(
            [*limit, *command, *self.arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        steps = [int(word) for word in done.stdout.split() if word.isdigit()]
        return str(max(steps)) if steps else "unknown"

    def requeue(self) -> bool:
        """Puts this job, or this task of an array, back into the queue."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Slurm ends this script now, and the rest must be said
        return call("scontrol", "requeue", self.me) == 0

    def train(self, command: list[str]) -> int:
        """Runs the step that trains, and returns 0, 64, 70 or 75.

        srun returns the highest code of its tasks: 75 if one ended with 64 and the others were stopped because of that.
        So this reads srun's messages about each task.
        """
        if self.warned:  # while the nodes were prepared
            return 75
        self.step = [subprocess.Popen(command, stderr=subprocess.PIPE)]
        (step,) = self.step
        if self.warned:
            step.send_signal(signal.SIGUSR1)
        assert step.stderr
        ended = set()
        for line in step.stderr:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            told = EXITED.fullmatch(line)
            if told:
                ended.add(int(told[1]))
        code = step.wait()
        self.step = []
        if 64 in ended:
            return 64
        return 70 if 70 in ended or code not in (0, 64, 70, 75) else code

    def finish(self, code: int) -> int:
        """Returns the job's code; first requeues it where the time limit has stopped the run.

        The second time in a row that the limit came before a new snapshot (the first may have made the environment),
        going on is useless.
        """
        fruitless = f".no-step-{self.id}"
        if code != 75 or not self.warned:
            remove(fruitless)
            return code
        # none: the warning came before this job had looked.
        if self.before == "unknown" or (self.before != "none" and self.look() != self.before):
            remove(fruitless)
        elif os.path.exists(fruitless):
            remove(fruitless)
            limit = ask("squeue", "-h", "-j", self.me, "-o", "%l")
            cure = f"submit again with a longer --time (now {limit})"
            complain(f"the time limit came before the first new snapshot, twice: {cure}")
            return 64
        else:
            open(fruitless, "w").close()
        if self.requeue():
            print("slurm: stopped for the time limit; back in the queue, to go on from the snapshot", flush=True)
        return code


def launch(job: Job) -> list[str]:
    return [*job.on_all, *job.python, "-m", "mingpt.launch", *job.arguments]


def tasks(job: Job) -> list[str]:
    cpus = os.environ.get("SLURM_CPUS_PER_TASK")
    options = [*job.srun_options, *([f"--cpus-per-task={cpus}"] if cpus else [])]
    return ["srun", "--kill-on-bad-exit=1", *options, *job.python, "-m", "mingpt.train", *job.arguments]


if __name__ == "__main__":
    start = {"launch": launch, "tasks": tasks}[sys.argv[1]]
    job = Job(sys.argv[2:])
    job.prepare()
    sys.exit(job.finish(job.train(start(job))))
