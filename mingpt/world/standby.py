"""A warm standby: a process that has imported torch and the trainer, and forks a launcher's workers.

These imports are most of a worker's start. They happen once, while the launcher imports torch itself; the workers of
every attempt are forks, which share that memory. Nothing but imports happens in the standby: it has one thread (else it
forks nothing), and has touched no device, so CUDA is initialized in a worker, as ever.

To the launcher, a worker is as if started by itself: its child (so its exit code, its signals, the death of the parent
and the parent's pid are as ever), in a session of its own, with the command line, the environment and the blocked
signals of a process that torchrun's agent starts. A standby that ends takes no worker with it; workers start cold then.

Imports only the standard library.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from mingpt.cli.console import say
from mingpt.world.env import AGENT_PID, START
from mingpt.world.lifetime import STOP_SIGNALS, end_with_parent, prctl

COMMAND = (sys.executable, "-u", START, "mingpt.train")  # as torchrun starts a worker
PIPE = "MINGPT_STANDBY_PIPE"  # set for the standby alone
COMPILES = "MINGPT_STANDBY_COMPILES"  # the same, if the config compiles
# Set for the standby alone, too: a fork has its worker's variables. As torch's compiler is imported, it asks whether
# there is a GPU. By default torch asks CUDA, which then has a thread, and is of no use after a fork (torch 2.11 on an
# H200: each compiled run started cold, after the standby's imports had been waited for). With this it asks NVML.
ASK_NO_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
READY = b"ready"
PR_SET_NAME = 15  # what `top` shows, since the command line is the same in all of them
PR_SET_CHILD_SUBREAPER = 36  # whether a descendant whose parent has ended becomes a child of this process


class Worker:
    """A child that subprocess has not started: it has what torch's agent uses of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> None:
        """Wait for its end, but not longer than so many seconds."""
        until = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < until:
            time.sleep(0.01)


class Standby:
    """The launcher's end. Make it in the main thread, with whose death the standby ends.

    seconds: the limit of each wait for it, its imports included. compiles: import torch's compiler, too.
    """

    def __init__(self, seconds: float, compiles: bool = False) -> None:
        self.seconds = seconds
        self.pipe, other = Pipe()  # and no socket in the file system: who can reach it can start processes
        # The standby never unblocks them: a platform that signals every process of a job does not end it.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            environment = os.environ | ASK_NO_CUDA | {PIPE: str(other.fileno())} | ({COMPILES: "1"} if compiles else {})
            self.process = subprocess.Popen(COMMAND, env=environment, pass_fds=[other.fileno()])
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        other.close()

    def fork(self, environment: dict[str, str]) -> Worker | None:
        """A worker with this environment. None: it has to be started cold."""
        if self.pipe.closed:
            return None
        answer = b"it has ended"
        # Only while it asks: else every orphan of a worker's, a compiler or a loader, would become a child that nobody
        # waits for.
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        with suppress(OSError, EOFError):
            ready = self._answer()
            if ready == READY:  # before that, a pipe that is full would block
                self.pipe.send_bytes(json.dumps(environment).encode())
                answer = self._answer()
            else:
                answer = ready
        prctl(PR_SET_CHILD_SUBREAPER, 0)
        if answer.isdigit():
            return Worker(int(answer))
        say(f"launch: workers start without the warm standby: {answer.decode()}")
        self.close()
        return None

    def _answer(self) -> bytes:
        seconds = min(self.seconds, 86400)  # poll counts milliseconds, of which it takes 2**31
        return self.pipe.recv_bytes() if self.pipe.poll(seconds) else b"no answer from it"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


def serve(imports: Callable[[], None]) -> None:
    """Import, and fork what the launcher asks for until that ends. Returns in each worker."""
    agent = int(os.environ[AGENT_PID])
    end_with_parent(agent)
    prctl(PR_SET_NAME, b"standby")
    with Connection(int(os.environ[PIPE])) as pipe:
        imports()
        while True:
            try:
                pipe.send_bytes(READY)
                environment = json.loads(pipe.recv_bytes())
            except (EOFError, OSError):  # the launcher has ended
                sys.exit()
            # A fork has one thread. What another one holds at that moment, a lock or half a change, stays so for ever.
            threads = len(os.listdir("/proc/self/task"))
            answer = b"it has %d threads, so a fork is not safe" % threads if threads > 1 else _fork(agent)
            if not answer:
                break
            pipe.send_bytes(answer)
    # The environment is the agent's for this worker, whole: what the standby has more (PIPE) is not for it.
    os.environ.clear()
    os.environ.update(environment)
    prctl(PR_SET_NAME, f"rank {environment['RANK']}".encode())


def _fork(agent: int) -> bytes:
    """The pid of a new process, which is the agent's child, in a session of its own; empty in that process."""
    # Forked twice: the agent adopts the orphan (it is a subreaper meanwhile). As a child of this process, its exit code
    # and its parent's death would be this one's, and the end of the standby would end all workers.
    reads, writes = os.pipe()
    if middle := os.fork():
        os.close(writes)
        os.waitpid(middle, 0)  # its child is an orphan, which the agent adopts
        with open(reads, "rb") as pid:
            return pid.read() or b"it can't fork"
    middle = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == middle:
        time.sleep(0.001)
    if os.getppid() != agent:  # it has died meanwhile: nobody waits for this process
        os._exit(1)
    os.setsid()
    os.write(writes, b"%d" % os.getpid())
    os.close(reads)
    os.close(writes)
    return b""
