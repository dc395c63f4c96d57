"""One start of a campaign's run: a launcher, or two on two nodes, and the crashes that happen to them."""

import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from crash_plan import DOUBLE, SERVER, Boundary, Plan
from crash_server import Keeper
from crash_witness import Violation, Witness, wipe
from node_kit import Node, free_port, listening, wait_until

KILLED, USER_ERROR, CRASHED, STOPPED = -signal.SIGKILL, 64, 70, 75
MOST_STEPS_BETWEEN = 25  # two crashes
LIMIT = 600  # seconds; a hang is a violation


@dataclass
class Start:
    """nodes: the numbers of those that take part, with as many processes each as `processes` says.

    crashes: how many to cause. training: the trainer's overrides. env: for sitecustomize. double: the run is started
    twice at once, on two nodes that know nothing of each other.
    """

    nodes: Sequence[int]
    processes: Sequence[int]
    crashes: int
    training: Sequence[str]
    env: Mapping[str, str]
    witness: Witness
    plan: Plan
    storage: str
    keeper: Keeper
    chooser: random.Random
    double: bool = False
    stopped: bool = False
    launchers: list[Node] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)  # launchers that were killed, by their place in `launchers`
    _armed: Boundary | None = None
    _countdown: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> list[int]:
        """The launchers' exit codes, after nothing of them is left. Raises Violation for one that must not be."""
        self._disarm()
        self._wait_some_steps()
        deaths, port = self.keeper.deaths, free_port()
        for rank, node in enumerate(self.nodes):
            if rank == 1 and not self.double:
                head = self.launchers[0].process
                wait_until(lambda: listening(port) or head.poll() is not None, "the rendezvous listens")  # noqa: B023
            cwd = self.witness.memories[node]  # snapshot.hot_dir is relative: each node has its own under one name
            self.launchers.append(Node(self._command(rank, port), self.env, cwd, self._read))
        try:
            codes = [launcher.wait(LIMIT) for launcher in self.launchers]
            for launcher in self.launchers:
                launcher.assert_nothing_left()
        finally:
            for launcher in self.launchers:
                launcher.kill()
        self._see_whether_it_happened()
        self._disarm()
        may_crash = self.keeper.deaths > deaths or (len(self.nodes) == 2 and self.dead)
        # A stop that comes when a worker has just died finds nobody who could store anything.
        may_crash = may_crash or (self.stopped and len(self.happened) > 1)
        reasons = {0: True, CRASHED: may_crash, STOPPED: self.stopped, USER_ERROR: self.double}
        for rank, code in enumerate(codes):
            if not reasons.get(code, code == KILLED and rank in self.dead):
                raise Violation(f"exit codes {codes} after {self.happened}:\n{self.output}")
        if self.double:
            self._happened(DOUBLE)
            if 0 not in codes:
                raise Violation(f"exit codes {codes}: none of two runs has finished:\n{self.output}")
        return codes

    @property
    def output(self) -> str:
        return "\n---\n".join(launcher.output[-6000:] for launcher in self.launchers)

    @property
    def _file(self) -> Path:
        return Path(self.env["CRASH_AT"])

    @property
    def _taken(self) -> Path:
        return self._file.with_name("taken")

    def _disarm(self) -> None:
        self._file.unlink(missing_ok=True)
        self._taken.unlink(missing_ok=True)

    def _command(self, rank: int, port: int) -> list[str]:
        options = [f"--nproc-per-node={self.processes[rank]}"]
        if len(self.nodes) == 2 and not self.double:
            # The second launcher starts once the first one listens: there its import of torch counts, too.
            # c10d: nodes with numbers would wait for a dead one once for each attempt.
            options += ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=campaign"]
            hosting = f"is_host={'true' if rank == 0 else 'false'},join_timeout=300"
            options += [f"--local-addr=127.0.0.{rank + 1}", f"--rdzv-conf={hosting}"]
        return [sys.executable, "-m", "mingpt.launch", *options, *self.training]

    def _wait_some_steps(self) -> None:
        self._countdown = self.chooser.randint(1, MOST_STEPS_BETWEEN)

    def _read(self, line: str) -> None:
        with self._lock:
            self.witness.read_line(line)
            if re.match(r"step +\d+/", line):
                self._after_step()

    def _after_step(self) -> None:
        self._see_whether_it_happened()
        if self._armed or len(self.happened) >= self.crashes:
            return
        self._countdown -= 1
        if self._countdown > 0:
            return
        crash = self.plan.draw(self.storage)
        if isinstance(crash, Boundary):
            self._armed = crash
            temporary = self._file.with_name("crash-at.tmp")
            temporary.write_text(crash.order)
            temporary.rename(self._file)
            return
        time.sleep(self.chooser.random() * 0.03)  # anywhere in a step
        with suppress(ProcessLookupError, IndexError):  # it was quicker
            if self._kill(crash):
                self._happened(crash)

    def _see_whether_it_happened(self) -> None:
        if self._armed and self._taken.exists():
            self._taken.unlink()
            self._happened(self._armed)
            self._armed = None

    def _happened(self, crash: "Boundary | str") -> None:
        self.plan.count(crash)
        self.happened.append(crash if isinstance(crash, str) else f"{crash.order} ({self.storage})")
        self._wait_some_steps()

    def _kill(self, kind: str) -> bool:
        if kind == SERVER:
            return self.keeper.kill()
        rank = self.chooser.randrange(len(self.nodes))
        if rank in self.dead:
            return False
        launcher = self.launchers[rank]
        if kind == "stop":
            os.kill(launcher.process.pid, signal.SIGTERM)
            self.stopped, self.crashes = True, 0  # the last one of this start
        elif kind == "worker":
            os.kill(self.chooser.choice(launcher.workers()), signal.SIGKILL)
        else:
            self.dead.add(rank)
            if kind == "agent":
                os.kill(launcher.process.pid, signal.SIGKILL)
            else:
                launcher.kill()
            if kind == "machine":
                wipe(self.witness.memories[self.nodes[rank]])
        return True
