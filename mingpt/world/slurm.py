"""Reads Slurm's variables, and lets srun's tasks form a world without torchrun.

Imports only the standard library: it runs before torch is imported, which takes seconds.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from mingpt.errors import UserError

# Step ids from here on belong to batch scripts and salloc's shells, not to steps of srun.
NO_STEP = 0xFFFFFFF0
# Below Linux's ephemeral ports (32768 to 60999), any of which may be in use.
FIRST_PORT, PORTS = 10000, 20000
RANGE = re.compile(r"(\d+)-(\d+)")  # in a host list
STEPS = 16  # ports reserved for each job; the next job, perhaps on the same node, has the next ones


def hostnames(text: str) -> list[str]:
    """The names in a host list: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7, login.

    Raises UserError if the text is no complete host list: the part that can be read would name too few nodes.
    """
    # Not by `scontrol show hostnames`: a container often has Slurm's variables, but not its programs.
    # Single characters, not [^][,]+, which has exponentially many ways to match a name: a truncated list would make
    # the regular expression backtrack for hours: 20 characters took 0.2 s, and four names of AWS hung every command.
    word = r"(?:[^][,]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
    backwards = False
    for ranges in re.findall(r"\[(.*?)\]", text):
        for first, last in RANGE.findall(ranges):
            backwards |= int(first) > int(last)
    if text and (backwards or not re.fullmatch(f"{word}(?:,{word})*", text)):
        raise UserError(
            f"{text}: Slurm's list of nodes (SLURM_STEP_NODELIST, SLURM_JOB_NODELIST) can't be read: expected names "
            f"such as gpu[01-03,7],login: leave these variables as Slurm sets them"
        )
    names: list[str] = []
    for several in re.findall(word, text):
        beginnings = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^]]*)\]", several):
            parts = [literal] if literal else _numbers(ranges)
            beginnings = [f"{name}{part}" for name in beginnings for part in parts]
        names += beginnings
    return names


def _numbers(ranges: str) -> list[str]:
    """`01-03,7` is 01, 02, 03, 7."""
    numbers: list[str] = []
    for part in ranges.split(","):
        if match := RANGE.fullmatch(part):
            width = len(match[1])
            numbers += [f"{number:0{width}}" for number in range(int(match[1]), int(match[2]) + 1)]
        else:
            numbers.append(part)
    return numbers


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether srun has started this process. SLURM_PROCID alone does not say so: in a batch script it is set to 0."""
    step = environment.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environment and step.isdecimal() and int(step) < NO_STEP


def nodes(environment: Mapping[str, str]) -> list[str]:
    """The names of the step's nodes, or else of the job's; rank 0 is on the first."""
    return hostnames(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""))


def port(environment: Mapping[str, str]) -> int:
    """A port that follows from job and step, so that all processes agree on it and other jobs have another."""
    job = environment.get("SLURM_JOB_ID", "")
    step = environment.get("SLURM_STEP_ID", "")
    number = int(job) * STEPS if job.isdecimal() else 0
    # Several steps of a job may run on one node at the same time.
    if step.isdecimal():
        number += int(step) % STEPS
    return FIRST_PORT + number % PORTS


def refuse_components(environment: Mapping[str, str]) -> None:
    """Raise UserError in a heterogeneous job of several components, each of which has its own nodes and ranks."""
    if (size := environment.get("SLURM_HET_SIZE", "1")) not in ("", "0", "1"):
        raise UserError(
            f"SLURM_HET_SIZE={size}: each component of a heterogeneous job would train alone, in one run.dir: ask for "
            f"all nodes in one component (they may differ in GPUs), or unset SLURM_HET_SIZE to train in this one only"
        )


def set_torchrun_variables(environment: MutableMapping[str, str]) -> None:
    """If srun has started this task, set the variables that torchrun would: RANK, WORLD_SIZE, MASTER_ADDR and so on.

    Changes nothing under a launcher, nor for the only task of a step. Raises UserError if one of Slurm's variables is
    missing; their values are checked where they are used (joining.py).
    """
    if "RANK" in environment or "SKYPILOT_NODE_IPS" in environment or not is_task(environment):
        return
    refuse_components(environment)
    # srun --export=NONE leaves a task few variables. The first task of a step on one node may be its only one, and then
    # trains alone as ever; any other would train alone beside its siblings, in one run.dir.
    first_of_one_node = environment["SLURM_PROCID"] == "0" and environment.get("SLURM_NNODES", "1") == "1"
    tasks = environment.get("SLURM_NTASKS", "1" if first_of_one_node else "")
    if tasks == "1":
        return
    if "SLURM_NTASKS" not in environment:
        raise UserError(
            f"srun has started this task, number {environment['SLURM_PROCID']} of a step of "
            f"{environment.get('SLURM_NNODES', '?')} nodes, but SLURM_NTASKS is not set: leave Slurm's variables as "
            f"Slurm sets them"
        )
    names = nodes(environment)
    if not names and "MASTER_ADDR" not in environment:
        raise UserError(
            f"srun has started {tasks} tasks (SLURM_NTASKS), but neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is "
            f"set: leave these variables as Slurm sets them, or set MASTER_ADDR to the node of task 0"
        )
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = tasks
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    environment.setdefault("MASTER_ADDR", next(iter(names), ""))
    environment.setdefault("MASTER_PORT", str(port(environment)))


def hides_gpus(environment: Mapping[str, str], visible: int) -> bool:
    """Whether Slurm hides the other tasks' GPUs from this task (--gpus-per-task, --gpu-bind)."""
    gpus = environment.get("SLURM_GPUS_ON_NODE", "")
    alone = is_task(environment) and "TORCHELASTIC_RUN_ID" not in environment
    return alone and gpus.isdecimal() and 0 < visible < int(gpus)


def task() -> int | None:
    """The pid of the task that this process belongs to: its ancestor, or itself, whose parent is a slurmstepd."""
    # No variable says it, and a shell script of the user's may stand between the task and this process.
    pid = os.getpid()
    with suppress(OSError):
        while pid > 1:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent and Path(f"/proc/{parent}/comm").read_text().strip() == "slurmstepd":
                return pid
            pid = parent
    return None


def supervisor() -> int | None:
    """The pid of this process's parent if that is a slurmstepd, through which Slurm tracks and signals this process."""
    return os.getppid() if task() == os.getpid() else None
