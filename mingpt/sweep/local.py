"""Runs trials on this machine, some at a time. Each is a process of its own, with its log beside its folder."""

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from mingpt.config.schema import Config
from mingpt.console import complain, say
from mingpt.errors import CRASHED, FINISHED, STOPPED, USER_ERROR, UserError
from mingpt.sweep.expand import Trial

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
    return True


def run(trials: Sequence[Trial], configs: Mapping[str, Config], parallel: int, processes: str | None, lock: int) -> int:
    """Run all trials. Returns the exit code: that of a stop, else of a crash, else of a user's error, else 0."""
    asked = list[int]()

    def ask(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    running, waiting, codes = dict[str, subprocess.Popen[bytes]](), list(trials), dict[str, int]()
    try:
        while running or (waiting and not asked):
            while waiting and len(running) < parallel and not asked:
                trial = waiting.pop(0)
                running[trial.name] = _start(trial, configs[trial.name], processes, lock)
                say(f"{trial.name}: started")
            for name, process in list(running.items()):
                if (code := process.poll()) is not None:
                    codes[name] = code
                    del running[name]
                    _tell(name, code)
            if asked and running:
                _stop(running, codes, max(config.launch.shutdown_timeout_seconds for config in configs.values()))
            time.sleep(LOOK_SECONDS)
    finally:
        for process in running.values():  # an error of our own
            process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
    ended = set(codes.values())
    if asked or STOPPED in ended:
        return STOPPED
    return CRASHED if ended - {FINISHED, USER_ERROR} else USER_ERROR if ended - {FINISHED} else FINISHED


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


def _tell(name: str, code: int) -> None:
    word = {FINISHED: "finished", STOPPED: "stopped on request", USER_ERROR: "failed: a user error (64)"}
    killed = f"killed by {signal.Signals(-code).name}" if code < 0 else f"failed ({code})"
    (say if code in (FINISHED, STOPPED) else complain)(f"{name}: {word.get(code, killed)}; see {name}.log")


def _stop(running: "dict[str, subprocess.Popen[bytes]]", codes: dict[str, int], limit: float) -> None:
    """Ask all to stop, and wait; those that have not ended in time are killed."""
    say(f"stopping {len(running)} trials; each writes a snapshot first")
    for process in running.values():
        with suppress(ProcessLookupError):
            process.terminate()
    until = time.monotonic() + limit
    for name, process in list(running.items()):
        try:
            codes[name] = process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            complain(f"{name}: has not stopped within {limit:.0f} s (launch.shutdown_timeout_seconds): killed")
            os.killpg(process.pid, signal.SIGKILL)
            codes[name] = process.wait()
        _tell(name, codes[name])
        del running[name]
