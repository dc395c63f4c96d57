"""Submits trials to Slurm, as one job array, or to SkyPilot, each as a managed job."""

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from mingpt.atomic import write_whole
from mingpt.console import say
from mingpt.errors import TransientError, UserError
from mingpt.sweep.expand import Trial

SCRIPT = "recipes/slurm/sweep.sbatch"
RECIPE = "recipes/train-spot.yaml"
TRIALS, JOB = "trials.txt", "slurm-job"
SECONDS = 300.0  # for one call of sbatch, squeue or sky


def lines_of(trials: Sequence[Trial]) -> str:
    """One line a trial, in the shell's quotes: sweep.sbatch reads line SLURM_ARRAY_TASK_ID."""
    lines = (shlex.join(trial.arguments).replace("\n", "'$'\\n''") for trial in trials)
    return "".join(f"{line}\n" for line in lines)


def sbatch(name: str, folder: Path, number: int, parallel: int | None, more: Sequence[str]) -> list[str]:
    array = f"--array=1-{number}{f'%{parallel}' if parallel else ''}"
    return ["sbatch", "--parsable", f"--job-name={name}", array, *more, SCRIPT, str(folder / TRIALS)]


def submit_array(command: Sequence[str], folder: Path, trials: Sequence[Trial], lock: int) -> None:
    """Raises UserError if the array that was submitted before is still in the queue: it reads the same file.

    lock: the folder's. sbatch inherits it, and writes the job's number itself: if this process is killed meanwhile,
    the next start waits for sbatch, up to 30 s, and then knows of the job.
    """
    job = folder / JOB
    if before := job.read_text().strip() if job.exists() else "":  # empty: sbatch failed
        before = before.partition(";")[0]
        known = _call(["squeue", "--noheader", f"--jobs={before}"], may_fail=True)
        if known.strip():
            raise UserError(f"{folder}: job {before} of this sweep is in Slurm's queue: wait, or scancel {before}")
    _there(SCRIPT)
    write_whole(folder / TRIALS, [lines_of(trials).encode()])
    with job.open("wb") as file:
        _call(command, stdout=file, pass_fds=[lock])
    number = job.read_text().strip().partition(";")[0]
    say(f"job {number}: {len(trials)} trials; the same command again submits those that have not finished")


def sky(trial: Trial, sweep: str, bucket: str, more: Sequence[str]) -> list[str]:
    """Raises UserError for what the recipe's variables can't carry."""
    experiment = [o.partition("=")[2] for o in trial.overrides if o.startswith("experiment=")]
    rest = [o for o in trial.overrides if not o.startswith("experiment=")]
    problems = [] if experiment else [f"experiment=… is missing: {RECIPE} has one of its own without it"]
    problems += [f"{o!r}: {RECIPE} divides OVERRIDES at spaces: write it without" for o in rest if len(o.split()) > 1]
    problems += [f"{o}: the machines do not have that folder: leave it out" for o in rest if o.startswith("--config-")]
    job = f"{sweep}-{trial.name}"
    if not re.fullmatch(r"[A-Za-z].*[A-Za-z0-9]", job):
        rule = "SkyPilot's names begin with a letter, and end with a letter or a digit"
        problems.append(f"{job}: {rule}: change --name, or the last value")
    if problems:
        raise UserError(*problems)
    values = {"BUCKET": bucket, "RUN": trial.name, "EXPERIMENT": experiment[-1]}
    values["OVERRIDES"] = " ".join([*rest, f"run.name={trial.name}"])
    named = [word for key, value in values.items() for word in ("--env", f"{key}={value}")]
    return ["sky", "jobs", "launch", "-y", "-d", "-n", job, *more, *named, RECIPE]


def submit_jobs(commands: Sequence[Sequence[str]]) -> None:
    """Those whose names are among the jobs that have not finished stay as they are."""
    _there(RECIPE)
    # Without --all, the answer ends after 50 jobs. It may begin with text: that the API server has been started.
    going_on = _call(["sky", "jobs", "queue", "--skip-finished", "--all", "-o", "json"]) if commands else ""
    for command in commands:
        name = command[command.index("-n") + 1]
        if f'"{name}"' in going_on:
            say(f"{name}: is going on")
            continue
        _call(command)
        say(f"{name}: submitted")


def _there(file: str) -> None:
    if not Path(file).is_file():
        raise UserError(f"{file} is not there: run this in the project's folder")


def _call(
    command: Sequence[str],
    may_fail: bool = False,
    stdout: IO[bytes] | int = subprocess.PIPE,
    pass_fds: Sequence[int] = (),
) -> str:
    # Its errors go to a file: a pipe whose reader was killed would end sbatch after it has submitted.
    with TemporaryFile("w+") as told:
        try:
            ended = subprocess.run(command, stdout=stdout, stderr=told, text=True, timeout=SECONDS, pass_fds=pass_fds)
        except FileNotFoundError:
            raise UserError(f"{command[0]} is not there: run this where it is installed, or use --on local") from None
        except subprocess.TimeoutExpired:
            late = f"{command[0]} has not answered within {SECONDS:.0f} s: look what is in the queue, then try again"
            raise TransientError(late) from None
        if ended.returncode and not may_fail:
            told.seek(0)
            raise UserError(f"{shlex.join(command[:3])} failed ({ended.returncode}): {told.read().strip()}")
    return ended.stdout or ""
