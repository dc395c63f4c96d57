"""Helpers for tests with several nodes on one machine: each node is a tree of real processes.

Every process of a node carries a marker in its environment, so that it is found whatever session, group or parent it
has by now: that is how `kill` reaches workers whose agent is gone, and how a test proves that no process was left.
"""

import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from mingpt.world import standby
from tests.kits import lockstep

_given = set[int]()  # by free_port
TIME_LIMIT = 600  # seconds for one node's command; a hang fails the test instead of the whole suite


needs_mount = pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="needs root: a disk or memory of its own is mounted in a private namespace",
)


def free_port() -> int:
    """Below the ephemeral ports, one of which another process's connection may take before it is listened on here.

    Each of pytest's workers has some of its own: what is started with one listens seconds later.
    """
    lowest = 10_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8 * 2_800
    while True:
        port = random.SystemRandom().randrange(lowest, lowest + 2_800)
        with socket.socket() as s, suppress(OSError):
            if port not in _given:
                s.bind(("127.0.0.1", port))
                _given.add(port)
                return port


def listening(port: int) -> bool:
    """Whether somebody listens at a port of loopback."""
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def wait_until(condition: Callable[[], object], what: str, limit: float = 300) -> None:
    """Look again and again, and fail after `limit` seconds. what: is waited for."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        time.sleep(0.02)


def ask_to_stop(*launchers: int, workers: Sequence[int], by: Sequence[int] = (signal.SIGTERM,)) -> None:
    """Signals to launchers, whose workers stand still until these have passed one on: they stop in this step."""
    for pid in workers:
        suspend(pid)

    def ask() -> None:
        for number in by:
            for pid in launchers:
                os.kill(pid, number)
        wait_until(lambda: all(pending(pid) & set(by) for pid in workers), "all workers have been asked")
        for pid in workers:
            os.kill(pid, signal.SIGCONT)

    threading.Thread(target=ask).start()  # the launchers print something first, so the reader must go on


def suspend(pid: int) -> None:
    """SIGSTOP, until it has stopped: a signal that comes at once would be dealt with before."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: re.search(r"^State:\s+T", Path(f"/proc/{pid}/status").read_text(), re.M), f"{pid} has stopped")


def pending(pid: int) -> set[int]:
    """The signals that wait for a process that stands still."""
    return signals(pid, "SigPnd|ShdPnd")


def signals(pid: int, masks: str) -> set[int]:
    """What these masks of a process's main thread hold, as in proc(5): SigBlk, SigCgt, …; several with | between."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.findall(rf"^(?:{masks}):\s+([0-9a-f]+)", status, re.M)
    return {n for n in range(1, 65) for mask in found if int(mask, 16) >> (n - 1) & 1}


def rank_of(pid: int) -> int:
    """A training process's rank; -1 if it has ended, or is the launcher's standby."""
    with suppress(OSError):
        # A fork of the standby has been given its environment later: its name tells.
        if match := re.match(r"rank (\d+)", Path(f"/proc/{pid}/comm").read_text()):
            return int(match[1])
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if any(v.startswith(f"{standby.PIPE}=".encode()) for v in variables):
            return -1
        return next((int(v[5:]) for v in variables if v.startswith(b"RANK=")), 0)
    return -1


class Node:
    """One command, all that it starts, and its output, line by line.

    `on_line` is called by the reading thread with each line, and `on_step` with the number of each step's. While they
    act, nothing of the node prints more than one line.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        on_line: Callable[[str], None] = lambda line: None,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.marker = f"MINGPT_TEST_NODE={uuid4().hex}"
        name, _, value = self.marker.partition("=")
        self.lines: list[str] = []
        self.on_line, self.on_step = on_line, on_step
        self.failure: Exception | None = None  # what they have raised
        self.process = lockstep.start(
            command,
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {}), name: value},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line)
            try:
                self.on_line(line)
                if match := re.match(r"step +(\d+)/", line):
                    self.on_step(int(match[1]))
            except Exception as error:
                self.failure = error
                self.kill()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def processes(self) -> dict[int, str]:
        """The living processes of this node: pid -> command line. Zombies are not alive."""
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if self.marker.encode() not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                if re.search(r"^State:\s+[ZX]", (entry / "status").read_text(), re.M):
                    continue
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (OSError, ProcessLookupError):  # it has ended while we looked
                continue
        return found

    def workers(self) -> list[int]:
        """The training processes by rank. (An agent's command line names mingpt.train, too, but not as its own module.)

        Not by number: the kernel's numbers begin anew at 32,768.
        """
        found = [p for p, c in self.processes().items() if re.search(r"-u (-m|\S+/start) mingpt\.train ", c)]
        ranks = {pid: rank for pid in found if (rank := rank_of(pid)) >= 0}
        return sorted(ranks, key=ranks.__getitem__)

    def loaders(self) -> list[int]:
        """The data loader's processes."""
        return sorted(p for p, c in self.processes().items() if "spawn_main" in c)

    def kill(self) -> None:
        """What the loss of a node does: SIGKILL to all of it, again and again until nothing is left."""
        deadline = time.monotonic() + 20
        while left := self.processes():
            assert time.monotonic() < deadline, f"cannot be killed: {left}"
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)
            self.process.poll()

    def wait(self, limit: float = TIME_LIMIT) -> int:
        """The exit code. Fails, after killing everything, if the limit passes."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.kill()
            self._reader.join(10)
            raise AssertionError(f"still running after {limit} s:\n{self.output[-6000:]}") from None
        self._reader.join(10)
        if self.failure:
            raise AssertionError(f"at a line of the output: {self.failure!r}:\n{self.output[-6000:]}") from self.failure
        return code

    def assert_nothing_left(self) -> None:
        """No process of this node is alive any more, after a minute at the latest."""
        try:
            wait_until(lambda: not self.processes(), "nothing is left behind", 60)
        except AssertionError:
            left = self.processes()
            self.kill()
            raise AssertionError(f"left behind: {left}\n{self.output[-3000:]}") from None
