"""Runs trials on this machine, some at a time. Each is a process of its own, with its log beside its folder."""

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mingpt.config.schema import Config
from mingpt.console import complain, say
from mingpt.errors import CRASHED, FINISHED, STOPPED, USER_ERROR, UserError
from mingpt.sweep.expand import Trial

if TYPE_CHECKING:
    from mingpt.sweep.median import Median  # needs the extra optuna

LOOK_SECONDS = 0.1  # between two looks at the processes
ORPHANS_SECONDS = 30.0  # for trials whose sweep was killed: they are stopping, and hold its lock
PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>


def command(trial: Trial, processes: str | None) -> list[str]:
    launcher = ["mingpt.launch", f"--nproc-per-node={processes}"] if processes else ["mingpt.train"]
    return [sys.executable, "-m", *launcher, *trial.arguments]


def environment(config: Config) -> dict[str, str]:
    """A trial's threads are its config's, however many trials there are at once: other counts give other bits."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(config.train.threads))


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """One sweep at a time. Yields a descriptor: the trials inherit it, so the lock lasts as long as any of them."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / "sweep.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        until = time.monotonic() + ORPHANS_SECONDS
        while not _lock(descriptor):
            if time.monotonic() > until:
                raise UserError(f"{folder}: another sweep, or a trial of it, is running there: wait for its end")
            time.sleep(LOOK_SECONDS)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        complain(f"{error.strerror}: this file system has no locks, so do not start this sweep twice at a time")
    return True


@dataclass
class Going:
    """A trial that runs. pruned: it was asked to stop since it is worse than others. until: then it is killed."""

    trial: Trial
    config: Config
    process: "subprocess.Popen[bytes]"
    pruned: bool = False
    until: float | None = None

    def ask(self) -> None:
        """Ask it to stop, once."""
        if self.until is None:
            self.until = time.monotonic() + self.config.launch.shutdown_timeout_seconds
            with suppress(ProcessLookupError):
                self.process.terminate()

    def kill_if_late(self) -> None:
        if self.until is not None and time.monotonic() > self.until:
            limit = f"{self.config.launch.shutdown_timeout_seconds:.0f} s (launch.shutdown_timeout_seconds)"
            complain(f"{self.trial.name}: has not stopped within {limit}: killed")
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def run(
    jobs: Iterator[tuple[Trial, Config]],
    parallel: int,
    processes: str | None,
    lock: int,
    median: "Median | None" = None,
    ended: Callable[[Trial, int, bool], None] = lambda trial, code, pruned: None,
) -> int:
    """Run all trials. Returns the exit code: that of a stop, else of a crash, else of a user's error, else 0.

    jobs: the next is taken when there is room for it. ended: is told each trial's exit code, and whether it was pruned.
    """
    asked, going, codes, more = list[int](), list[Going](), set[int](), True
    before = {n: signal.signal(n, lambda n, _: asked.append(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        while going or (more and not asked):
            while more and len(going) < parallel and not asked:
                if job := next(jobs, None):
                    going.append(Going(*job, _start(*job, processes, lock)))
                    say(f"{job[0].name}: started")
                more = job is not None
            for one in list(going):
                one.kill_if_late()
                if (code := one.process.poll()) is not None:
                    going.remove(one)
                    pruned = one.pruned and code == STOPPED
                    codes.add(FINISHED if pruned else code)
                    _tell(one.trial.name, code, pruned)
                    ended(one.trial, code, pruned)
            if asked and any(one.until is None for one in going):
                say(f"stopping {len(going)} trials; each writes a snapshot first")
                for one in going:
                    one.ask()
            elif median:
                _prune(going, median)
            time.sleep(LOOK_SECONDS)
    finally:
        for one in going:  # an error of our own
            one.process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked or STOPPED in codes:
        return STOPPED
    return CRASHED if codes - {FINISHED, USER_ERROR} else USER_ERROR if codes - {FINISHED} else FINISHED


def _prune(going: Sequence[Going], median: "Median") -> None:
    for one in going if median.is_time() else ():
        if one.until is None and (why := median.reason(one.trial.folder, one.config.train.max_steps)):
            say(f"{one.trial.name}: asked to stop: {why}")
            one.pruned = True
            one.ask()


def _start(trial: Trial, config: Config, processes: str | None, lock: int) -> "subprocess.Popen[bytes]":
    parent, prctl = os.getpid(), getattr(ctypes.CDLL(None), "prctl", None)

    def follow() -> None:
        """The kernel asks the trial to stop when the sweep dies (Linux)."""
        if prctl:
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(STOPPED)

    with Path(f"{trial.folder}.log").open("ab") as log:
        return subprocess.Popen(
            command(trial, processes),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment(config)},
            pass_fds=[lock],
            start_new_session=True,  # Ctrl-C comes to the sweep, which asks each trial once
            preexec_fn=follow,
        )


def _tell(name: str, code: int, pruned: bool) -> None:
    word = {FINISHED: "finished", STOPPED: "stopped on request", USER_ERROR: "failed: a user error (64)"}
    other = f"killed by {signal.Signals(-code).name}" if code < 0 else f"failed ({code})"
    how = "pruned" if pruned else word.get(code, other)
    (say if code in (FINISHED, STOPPED) else complain)(f"{name}: {how}; see {name}.log")
