"""How a training process ends when something outside wants it to: signals, its agent's death, the reason it leaves.

Only the standard library is imported here: all of this must be in place before the seconds that torch's import takes.
"""

import ctypes
import json
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from multiprocessing import resource_tracker

from mingpt.console import complain
from mingpt.errors import CRASHED, STOPPED
from mingpt.world import slurm
from mingpt.world.clock import Clock

# All that torchrun can hand on to its workers. Slurm warns with SIGUSR1 if asked to, a closed terminal with SIGHUP.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")]
AGENT_PID = "MINGPT_AGENT_PID"  # set by mingpt.launch for its workers
OVERRIDES = "MINGPT_OVERRIDES"  # of the config, a JSON list; as AGENT_PID
# Slurm and SkyPilot signal every process of a job, and torchrun hands its own signal on to its workers: one request
# arrives several times within a moment. Only a signal after this many seconds is a second request.
AGAIN_SECONDS = 2.0
PARENT_SECONDS = 1.0  # between two looks at the parent, for systems that have no parent-death signal


class Phase(IntEnum):
    STARTING = 0  # no world yet: a stop ends this process at once, nothing would be lost
    JOINED = 1  # in a world, before the first step: a stop waits for that step
    TRAINING = 2
    OVER = 3  # the exit code is settled: signals change nothing any more


class Lifetime:
    """The life of this process in its attempt. `stop`: whether somebody has asked this process to stop.

    says: how its last words begin.
    """

    def __init__(self, says: str = "") -> None:
        self.says = says
        self.phase = Phase.STARTING
        self.stop = False
        self.clock = Clock()
        self._asked_at = 0.0
        self._released = threading.Event()
        self._parent: int | None = None

    def begin(self) -> None:
        """Listen to signals, and end with the agent that has started this process. Call it first, in the main thread.

        A thread listens, through the interpreter's wake-up pipe: Python runs signal handlers in the main thread only,
        and that one may sit in a collective for minutes when the second signal says "now".
        """
        under_agent = "TORCHELASTIC_RUN_ID" in os.environ
        if under_agent:
            self._parent = int(os.environ.get(AGENT_PID, os.getppid()))
            end_with_parent(self._parent)
        else:  # without its slurmstepd, Slurm has forgotten us, and may give our GPUs to others
            self._parent = slurm.supervisor()
        pipe, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            # What is ignored from the start (nohup, a shell's `&`) stays so; but an agent hands on what it was sent.
            if under_agent or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, args=(pipe,), name="lifetime", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # mingpt.launch has blocked them for its workers

    def join_world(self) -> None:
        """From now on a stop waits for the first step, in which all processes hear of it."""
        self.phase = Phase.JOINED

    def train(self) -> None:
        """The first step is done: what goes wrong from here on may go well at the next try."""
        self.phase = Phase.TRAINING

    def settle(self) -> None:
        """The exit code is settled: signals change nothing any more."""
        self.phase = Phase.OVER

    def wait_for_nodes(self) -> None:
        """Of an agent without workers: a signal ends it at once, since torch's waits hear none."""
        self.phase = Phase.STARTING

    def linger(self, seconds: float) -> bool:
        """Wait, but not beyond the next signal: an agent sends one as soon as another of its workers has ended.

        Returns whether there was one.
        """
        self.settle()
        return self._released.wait(seconds)

    def _watch(self, pipe: int) -> None:
        while True:
            ready, _, _ = select.select([pipe], [], [], PARENT_SECONDS)
            for number in os.read(pipe, 64) if ready else ():
                self._on_signal(signal.Signals(number))
            if self._parent is not None and os.getppid() != self._parent:
                os._exit(CRASHED)

    def _on_signal(self, number: signal.Signals) -> None:
        if number not in STOP_SIGNALS:
            return
        self._released.set()
        if self.phase is Phase.OVER:
            return
        if not self.stop:
            self.stop, self._asked_at = True, time.monotonic()
            if self.phase is Phase.STARTING:
                self._end(STOPPED, f"{number.name}: stopped on request before the first step")
        elif time.monotonic() - self._asked_at > AGAIN_SECONDS:
            self._end(CRASHED, f"a second signal ({number.name}): ended at once, without a snapshot")

    def _end(self, code: int, reason: str) -> None:
        leave_reason(reason)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            complain(self.says.format(code=code) + reason)
        os._exit(code)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies (Linux); end here if that has happened already.

    torchrun starts workers in sessions of their own: without this they outlive a killed agent and go on training.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG, prctl(2)
    if os.getppid() != parent:
        os._exit(CRASHED)


@contextmanager
def children_ignore_signals() -> Iterator[None]:
    """Processes started in this block never see a stop signal, from their first instruction on.

    They inherit the mask. A signal to this process is not lost: another thread takes it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # once for all children; its start ends with SIGTERM and SIGINT unblocked
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def leave_reason(text: str) -> None:
    """Write the error file of torch's `record`, from which the agent learns in one line why this process ended.

    Not through `record` itself: its files hold a stack trace, which torchrun would print as the reason.
    """
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(path, "w") as f:
            json.dump({"message": {"message": text, "extraInfo": extra}}, f)
