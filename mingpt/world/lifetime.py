"""What ends a process from outside: stop signals, and the death of the agent that started it.

Imports only the standard library: signals must be handled before torch is imported, which takes seconds.
"""

import ctypes
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType

from mingpt.cli.console import complain
from mingpt.cli.redact import redacted
from mingpt.errors import CRASHED, STOPPED, exit_now
from mingpt.world import slurm
from mingpt.world.clock import Clock, Pauses
from mingpt.world.env import Env

# The signals that torchrun can forward to its workers. Slurm sends SIGUSR1 if asked to, a closed terminal sends SIGHUP.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")]
# Slurm and SkyPilot signal every process of a job, and torchrun forwards its own signal to its workers, so one request
# arrives several times. Only a signal that comes more than this many seconds later is a second request.
AGAIN_SECONDS = 2.0
PR_SET_PDEATHSIG = 1  # of Linux's <sys/prctl.h>
_PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # looked up here, since a fork should load nothing
PARENT_SECONDS = 1.0  # between two checks of the parent's pid, for systems without a parent-death signal


class Phase(IntEnum):
    """How far this process has come: it never goes back. (What it does now is another fact: Clock.phase.)"""

    STARTING = 0  # no world yet: a stop ends this process at once, since there is nothing to lose
    JOINED = 1  # in a world: a stop takes effect with the next step, whose exchange carries it to all processes
    TRAINING = 2  # the first step is done: running out of memory may be temporary now (see failures.py)
    OVER = 3  # the exit code is decided: signals are ignored


class Lifetime:
    """Handles stop signals according to the phase of this process."""

    def __init__(self, prefix: str = "", trains: bool = True, code: int | None = None) -> None:
        """prefix: printed before the reason if a signal ends this process; may contain {code}, the exit code.

        trains: False: nothing is lost at a stop, which ends this process at once, with `code`, or as shells report a
        signal (130, 143).
        """
        self.prefix, self.trains, self.code = prefix, trains, code
        self.phase = Phase.STARTING
        self.stop = False  # this process was asked to stop
        self.ending = False  # how the attempt ends is being told, within limits of its own: no hang
        self.observers = list[Callable[[BaseException], None]]()  # of the error that ends the attempt
        self.clock = Clock()
        self._asked_at = 0.0
        self._signalled = threading.Event()
        self._parent: int | None = None

    def begin(self) -> None:
        """Handle stop signals, and end when the parent dies. Call it first, in the main thread."""
        if agent := Env.read().agent:
            end_with_parent(agent)
            self._parent = agent
        else:  # once its slurmstepd is dead, Slurm no longer counts this process, and may give its GPUs to others
            self._parent = slurm.supervisor()
        # A thread reads the signals from the interpreter's wake-up pipe. Python runs handlers in the main thread only,
        # and between two bytecodes: it may be inside a collective for minutes when the second signal asks for an
        # immediate end. An exception in place of the thread was lost in imports ("maximum recursion depth exceeded",
        # 64).
        pipe, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            # A signal that is ignored from the start (nohup, a shell's `&`) stays ignored; not under an agent, which
            # forwards only what it handles itself.
            if agent or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _leave_to_thread)
        threading.Thread(target=self._watch, args=(pipe,), name="lifetime", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # launch/agent.py blocks them for its workers

    def ignore_signals(self) -> None:
        """The exit code is decided. From now on, signals are ignored."""
        self.phase = Phase.OVER

    def failed(self, error: BaseException) -> None:
        """Tell the observers that an error ends the attempt. Its reason has been printed."""
        for observer in self.observers:
            observer(error)

    def wait_for_signal(self, seconds: float) -> bool:
        """Whether a signal comes in time. The agent sends one as soon as another of its workers has ended."""
        self.ignore_signals()
        return self._signalled.wait(seconds)

    def _watch(self, pipe: int) -> None:
        pauses = Pauses()
        while True:
            ready, _, _ = select.select([pipe], [], [], PARENT_SECONDS)
            if paused := pauses.look(PARENT_SECONDS):
                self.clock.pause(paused)
                if self.phase is not Phase.STARTING and not Env.read().rank:  # once a run, not by a launcher, too
                    complain(f"this process did not run for {paused:.0f} s: a signal stopped it, or the machine slept")
            for number in os.read(pipe, 64) if ready else ():
                self._on_signal(signal.Signals(number))
            # Where the kernel sends no signal at the parent's death (not Linux), or the parent is a slurmstepd.
            if self._parent is not None and os.getppid() != self._parent:
                exit_now(CRASHED)

    def _on_signal(self, number: signal.Signals) -> None:
        if number not in STOP_SIGNALS:
            return
        self._signalled.set()
        if self.phase is Phase.OVER:
            return
        if not self.trains:
            if signal.getsignal(number) is _leave_to_thread:  # else a handler of the command's own cleans up
                exit_now(self.code or 128 + number)
            return
        if not self.stop:
            self.stop = True
            self._asked_at = time.monotonic()
            if self.phase is Phase.STARTING:
                self._end(STOPPED, f"{number.name}: stopped on request before the first step")
            # An agent says so itself, if it gets the signal, too. If one worker alone gets it, nobody says so.
            if not Env.read().agent:
                complain(f"{number.name}: stopping after this step; once more ends it at once")
        elif time.monotonic() - self._asked_at > AGAIN_SECONDS:
            self._end(CRASHED, f"a second signal ({number.name}): ended at once, without a snapshot")

    def _end(self, code: int, reason: str) -> None:
        leave_reason(reason)
        if not Env.read().local_rank:
            complain(self.prefix.format(code=code) + reason)
        exit_now(code)


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """A handler, so that Python writes the signal's number to the pipe."""


def prctl(option: int, value: int | bytes) -> None:
    """prctl(2); does nothing where there is none (not Linux)."""
    if _PRCTL is not None:
        _PRCTL(option, value, 0, 0, 0)


def end_with_parent(parent: int, number: int = signal.SIGKILL, code: int = CRASHED) -> None:
    """Have the kernel send this process a signal when its parent dies (Linux); exit if the parent is dead already."""
    # torchrun starts each worker in its own session. Without this, workers survive a killed agent and keep training.
    prctl(PR_SET_PDEATHSIG, number)
    # It may have died before that call, for which the kernel sends nothing.
    if os.getppid() != parent:
        exit_now(code)


@contextmanager
def children_ignore_signals() -> Iterator[None]:
    """Processes started in this block inherit a mask that blocks stop signals.

    A signal to this process is not lost: another thread, which does not block it, receives it.
    """
    # Not by a handler that the children install: a signal may come before it. A mask is there from their first moment.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # starting it later, with the first child, would unblock SIGTERM and SIGINT
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def leave_reason(text: str) -> None:
    """Write why this process ends to the error file that torchrun's agent reads (TORCHELASTIC_ERROR_FILE).

    The first reason stands: what follows is a consequence, such as a connection that another process has closed.
    """
    # Not by torch's `record`: it writes a stack trace, which torchrun would print as the reason.
    text = redacted(text)  # torchrun's agent prints the file as it is
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not os.path.exists(path):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        try:
            # At once: a launcher that reads a half-written file dies of it, and its exit code tells nothing.
            temporary = Path(f"{path}.{os.getpid()}")
            temporary.write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
            temporary.replace(path)
        except OSError as error:  # a full disk must not keep this process from ending
            complain(f"why this process ends could not be written for its launcher: {error}")
