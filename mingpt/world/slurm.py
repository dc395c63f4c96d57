"""What Slurm tells a process about its job, and how srun's tasks become a world without torchrun.

Only the standard library is imported here: this is asked before the seconds that torch's import takes.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from mingpt.errors import UserError

# Ids from here on are not those of srun's steps, but of Slurm's own: a batch script's, an interactive salloc's shell.
NO_STEP = 0xFFFFFFF0
# Below Linux's ephemeral ports (32768 to 60999), which any program may be holding.
FIRST_PORT, PORTS = 10000, 20000
RANGE = re.compile(r"(\d+)-(\d+)")  # in a host list
STEPS = 16  # of one job, before their ports meet those of the next job, which may be on the same node


def hostnames(text: str) -> list[str]:
    """The names in a host list: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7, login.

    Not by `scontrol show hostnames`: inside of a container there is often no Slurm, only its variables.
    Raises UserError if it is no such list: read as far as it goes, it would give other nodes than there are.
    """
    # One character at a time: with [^][,]+ here, a name could be matched in as many ways as it can be cut into pieces,
    # and all of them would be tried on a list that is cut off, for hours.
    word = r"(?:[^][,]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
    backwards = any(int(a) > int(b) for part in re.findall(r"\[(.*?)\]", text) for a, b in RANGE.findall(part))
    if text and (backwards or not re.fullmatch(f"{word}(?:,{word})*", text)):
        raise UserError(
            f"{text}: Slurm's list of nodes (SLURM_STEP_NODELIST, SLURM_JOB_NODELIST) can't be read: expected names "
            f"such as gpu[01-03,7],login: leave these variables as Slurm sets them"
        )
    names: list[str] = []
    for several in re.findall(word, text):
        found = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^]]*)\]", several):
            found = [f"{name}{part}" for name in found for part in ([literal] if literal else _numbers(ranges))]
        names += found
    return names


def _numbers(ranges: str) -> list[str]:
    """`01-03,7` is 01, 02, 03, 7."""
    found: list[str] = []
    for part in ranges.split(","):
        if match := RANGE.fullmatch(part):
            width = len(match[1])
            found += [f"{number:0{width}}" for number in range(int(match[1]), int(match[2]) + 1)]
        else:
            found.append(part)
    return found


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether srun has started this process. (SLURM_PROCID is set in a batch script, too, and is 0 there.)"""
    step = environment.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in environment and step.isdecimal() and int(step) < NO_STEP


def nodes(environment: Mapping[str, str]) -> list[str]:
    """The names of the step's nodes, or of the job's; the first has the process of rank 0."""
    return hostnames(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""))


def port(environment: Mapping[str, str]) -> int:
    """A port that the step's processes agree on, and other jobs on the same nodes avoid."""
    job, step = (environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    number = int(job) * STEPS if job.isdecimal() else 0
    return FIRST_PORT + (number + (int(step) % STEPS if step.isdecimal() else 0)) % PORTS


def announce(environment: MutableMapping[str, str]) -> None:
    """Tell this process what torchrun would: its rank, the others, and where to meet, if srun has started it.

    Nothing is changed under a launcher, nor for the only task of a step. What is announced is checked where it is read.
    """
    if "RANK" in environment or "SKYPILOT_NODE_IPS" in environment or not is_task(environment):
        return
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
    """Whether Slurm shows this task its own GPUs only (--gpus-per-task, --gpu-bind), fewer than the node gives."""
    given = environment.get("SLURM_GPUS_ON_NODE", "")
    alone = is_task(environment) and "TORCHELASTIC_RUN_ID" not in environment
    return alone and given.isdecimal() and 0 < visible < int(given)


def supervisor() -> int | None:
    """The process id of this process's parent if that is a slurmstepd, by which Slurm counts and signals us."""
    parent = os.getppid()
    with suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().strip() == "slurmstepd":
            return parent
    return None
