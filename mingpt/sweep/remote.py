"""Submits trials to Slurm, as one job array, or to SkyPilot, each as a managed job."""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import which
from tempfile import TemporaryFile

from mingpt.atomic import write_whole
from mingpt.console import complain, say
from mingpt.errors import TransientError, UserError
from mingpt.sweep.expand import Trial

SCRIPT = "recipes/slurm/sweep.sbatch"
RECIPE = "recipes/train-spot.yaml"
NEEDED = {"slurm": (SCRIPT, "sbatch"), "sky": (RECIPE, "sky")}
TRIALS, JOB = "trials.txt", "slurm-job"
SECONDS = 300.0  # for one call of sbatch, squeue or sky


def lines_of(trials: Sequence[Trial]) -> str:
    """One line a trial, in the shell's quotes: sweep.sbatch reads line SLURM_ARRAY_TASK_ID."""
    lines = (shlex.join(trial.arguments).replace("\n", "'$'\\n''") for trial in trials)
    return "".join(f"{line}\n" for line in lines)


def sbatch(name: str, folder: Path, number: int, parallel: int | None, more: Sequence[str]) -> list[str]:
    array = f"--array=1-{number}{f'%{parallel}' if parallel else ''}"
    return ["sbatch", "--parsable", f"--job-name={name}", array, *more, SCRIPT, str(folder / TRIALS)]


def check_there(on: str) -> None:
    """Raises UserError if the program or the file that a sweep on `slurm` or `sky` needs is missing."""
    file, program = NEEDED[on]
    problems = [] if which(program) else [_absent(program)]
    if not Path(file).is_file():
        problems.append(f"{file} is not there: run this in the project's folder")
    if problems:
        raise UserError(*problems)


def submit_array(command: Sequence[str], folder: Path, trials: Sequence[Trial], lock: int) -> None:
    """Raises UserError if the array that was submitted before is still in the queue: it reads the same file.

    lock: the folder's. sbatch inherits it, and writes the job's number itself: if this process ends meanwhile, the next
    start waits for sbatch, up to 30 s, and then knows of the job.
    """
    file = folder / JOB
    if file.exists():
        _refuse_if_queued(file)
    write_whole(folder / TRIALS, [lines_of(trials).encode()])
    code, said = _submit(command, file, lock)
    if code > 0:  # less: a signal ended it, perhaps after it had submitted
        file.unlink()
        raise UserError(f"{shlex.join(command[:3])} failed ({code}): {said}")
    number, _ = _job(file)
    say(f"job {number}: {len(trials)} trials; the same command again submits those that have not finished")


def _submit(command: Sequence[str], file: Path, lock: int) -> tuple[int, str]:
    """sbatch's exit code and errors. It is never ended here: it may have submitted, and not yet have said so."""
    goes_on = f"notes its job's number in {file}: the same command again reads it"
    # Its errors go to a file: a pipe whose reader was killed would end sbatch after it has submitted.
    with file.open("wb") as number, TemporaryFile("w+", errors="replace") as said:
        try:
            # In a session of its own it does not get the terminal's Ctrl-C.
            process = subprocess.Popen(command, stdout=number, stderr=said, pass_fds=[lock], start_new_session=True)
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            late = f"sbatch has not answered within {SECONDS:.0f} s, and goes on: it {goes_on}"
            raise TransientError(late) from None
        except OSError:  # it can't be started
            raise
        except BaseException:  # a request to stop, which may come while Popen learns that it has started
            complain(f"sbatch goes on, and {goes_on}")
            raise
        said.seek(0)
        return code, said.read().strip()


def _job(file: Path) -> tuple[str, list[str]]:
    """The job's number, and the option that names its cluster, of what sbatch has written."""
    text = file.read_text(errors="replace").strip()
    if not (found := re.fullmatch(r"([0-9]+)(?:;([\w.-]+))?", text)):
        # Not "try again": nothing but the queue says whether there is a job, so a person must look.
        raise UserError(
            f"{file}: {text[:200]!r} is no job's number, so this sweep may be in Slurm's queue: look there (squeue -u "
            "$USER, and --clusters if sbatch got it). If it is there, write its number, or NUMBER;CLUSTER, into the "
            "file, or scancel it and delete the file; else delete the file. Then start again"
        )
    return found[1], [f"--clusters={found[2]}"] if found[2] else []


def _refuse_if_queued(file: Path) -> None:
    number, cluster = _job(file)
    command = ["squeue", "--noheader", f"--jobs={number}", *cluster]
    # The user's variables would filter the answer, or ask another cluster.
    rest = {k: v for k, v in os.environ.items() if not k.startswith("SQUEUE_") and k != "SLURM_CLUSTERS"}
    asked = _run(command, rest)
    if asked.returncode:
        if "Invalid job id specified" in asked.stderr:  # it has ended some time ago
            return
        said = asked.stderr.strip() or "it said nothing"
        raise TransientError(
            f"{shlex.join(command)} failed ({asked.returncode}): {said}\nNothing was submitted, since job {number} of "
            f"this sweep may be in the queue: try again (or, if you know that it has ended, delete {file})"
        )
    # Older versions print the cluster's name without a header, too.
    if any(line.strip() and not line.startswith("CLUSTER: ") for line in asked.stdout.splitlines()):
        end = shlex.join(["scancel", *cluster, number])
        raise UserError(f"{file.parent}: job {number} of this sweep is in Slurm's queue: wait, or end it: {end}")


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
    # Without --all, the answer ends after 50 jobs. It may begin with text: that the API server has been started.
    going_on = _call(["sky", "jobs", "queue", "--skip-finished", "--all", "-o", "json"]) if commands else ""
    for command in commands:
        name = command[command.index("-n") + 1]
        if f'"{name}"' in going_on:
            say(f"{name}: is going on")
            continue
        _call(command)
        say(f"{name}: submitted")


def _absent(program: str) -> str:
    return f"{program} is not there: run this where it is installed, or use --on local"


def _call(command: Sequence[str]) -> str:
    ended = _run(command)
    if ended.returncode:
        raise UserError(f"{shlex.join(command[:3])} failed ({ended.returncode}): {ended.stderr.strip()}")
    return ended.stdout


def _run(command: Sequence[str], env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, env=env)
    except FileNotFoundError:
        raise UserError(_absent(command[0])) from None
    except subprocess.TimeoutExpired:
        late = f"{command[0]} has not answered within {SECONDS:.0f} s: look what is in the queue, then try again"
        raise TransientError(late) from None
