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
from typing import TYPE_CHECKING

from tests.kits.crash_plan import DOUBLE, SERVER
from tests.kits.crash_witness import Witness, wipe
from tests.kits.node_kit import Node, free_port, listening, wait_until
from tests.kits.store_kit import ProxiedMoto, forget_clients

if TYPE_CHECKING:
    from tests.kits.crash_campaign import Campaign

KILLED, USER_ERROR, CRASHED, STOPPED = -signal.SIGKILL, 64, 70, 75
MOST_STEPS_BETWEEN = 25  # two crashes
LIMIT = 600  # seconds; a hang is a violation
LONGEST_ABSENCE = 8.0  # seconds, of the storage server; shorter and longer than snapshot.retry_seconds


class Keeper:
    """The storage server. Whoever kills it, it is there again a random short time later, on its port, with its data.

    pid_file: where those find its process id who are to kill it.
    """

    def __init__(self, folder: Path, pid_file: Path, chooser: random.Random) -> None:
        self.server, self.pid_file, self.chooser = ProxiedMoto(folder), pid_file, chooser
        self.deaths = 0
        self.present, self.closed = threading.Event(), threading.Event()
        self._start()
        os.environ.update(self.server.environment(self.server.port))
        forget_clients()
        self.server.make_bucket()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        self.process = self.server.start()
        self.pid_file.write_text(str(self.process.pid))
        self.present.set()

    def _keep(self) -> None:
        while not self.closed.is_set():
            self.process.wait()
            self.present.clear()
            self.deaths += 1
            if not self.closed.wait(self.chooser.uniform(0.1, LONGEST_ABSENCE)):
                self._start()

    def come_back(self) -> None:
        wait_until(self.present.is_set, "the storage server is there again")

    def close(self) -> None:
        self.closed.set()
        self.server.close()
        self._thread.join()


@dataclass
class Start:
    """world: how many processes each node has that takes part. training: the trainer's overrides.

    most: how many crashes to cause. double: the run is started twice at once, on nodes that know nothing of each other.
    """

    campaign: "Campaign"
    witness: Witness
    storage: str
    world: Mapping[int, int]
    training: Sequence[str]
    most: int
    double: bool
    stopped: bool = False
    launchers: list[Node] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)  # launchers that were killed, by their place in `launchers`
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> list[int]:
        """The launchers' exit codes, after nothing of them is left. Fails for one that must not be."""
        self._wait_some_steps()
        keeper, port = self.campaign.keeper, free_port()
        deaths = keeper.deaths
        try:
            for rank, node in enumerate(self.world):
                if rank == 1 and not self.double:
                    head = self.launchers[0].process
                    wait_until(lambda: listening(port) or head.poll() is not None, "the rendezvous listens")  # noqa: B023
                cwd = self.witness.memories[node]  # snapshot.hot_dir is relative: each node has its own under one name
                self.launchers.append(Node(self._command(rank, port), self.campaign.env, cwd, self._read))
            codes = [launcher.wait(LIMIT) for launcher in self.launchers]
            for launcher in self.launchers:
                launcher.assert_nothing_left()
        finally:
            for launcher in self.launchers:
                launcher.kill()
        self._see_whether_it_happened()
        self.campaign.armed.unlink(missing_ok=True)
        may_crash = keeper.deaths > deaths or (len(self.world) == 2 and self.dead)
        # A stop that comes when a worker has just died finds nobody who could store anything.
        may_crash = may_crash or (self.stopped and len(self.happened) > 1)
        reasons = {0: True, CRASHED: may_crash, STOPPED: self.stopped, USER_ERROR: self.double}
        for rank, code in enumerate(codes):
            allowed = reasons.get(code, code == KILLED and rank in self.dead)
            assert allowed, f"exit codes {codes} after {self.happened}:\n{self.output}"
        if self.double:
            self._happened(DOUBLE)
            assert 0 in codes, f"exit codes {codes}: none of two runs has finished:\n{self.output}"
        return codes

    @property
    def output(self) -> str:
        return "\n---\n".join(launcher.output[-6000:] for launcher in self.launchers)

    def _command(self, rank: int, port: int) -> list[str]:
        options = [f"--nproc-per-node={[*self.world.values()][rank]}"]
        if len(self.world) == 2 and not self.double:
            # c10d: in a static rendezvous nodes would wait for a dead one once for each attempt. The limit is long,
            # since the second launcher starts once the first one listens: there its import of torch counts, too. So
            # long, too, a node waits for another that was killed: nobody starts that again before all have ended.
            options += ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=campaign"]
            options += [f"--node-rank={rank}", f"--local-addr=127.0.0.{rank + 1}", "--rdzv-conf=join_timeout=120"]
        return [sys.executable, "-m", "mingpt.launch", *options, *self.training]

    def _wait_some_steps(self) -> None:
        self._countdown = self.campaign.random.randint(1, MOST_STEPS_BETWEEN)

    def _read(self, line: str) -> None:
        with self._lock:
            self.witness.read_line(line)
            if re.match(r"step +\d+/", line):
                self._after_step()

    def _after_step(self) -> None:
        self._see_whether_it_happened()
        self._countdown -= 1
        crashes = [crash for crash in self.campaign.plan.upcoming(self.storage) if crash != DOUBLE]
        armed = self.campaign.armed
        if self._countdown > 0 or not crashes or len(self.happened) >= self.most or armed.exists():
            return
        if " " in crashes[0]:
            temporary = armed.with_name("crash-at.tmp")
            temporary.write_text(crashes[0])
            temporary.rename(armed)
            return
        time.sleep(self.campaign.random.random() * 0.03)  # anywhere in a step
        with suppress(ProcessLookupError, IndexError):  # it was quicker
            if self._kill(crashes[0]):
                self._happened(crashes[0])

    def _see_whether_it_happened(self) -> None:
        taken = self.campaign.armed.with_name("taken")
        if taken.exists():
            self._happened(taken.read_text())
            taken.unlink()

    def _happened(self, crash: str) -> None:
        self.campaign.plan.count(self.storage, crash)
        self.happened.append(crash)
        self._wait_some_steps()

    def _kill(self, kind: str) -> bool:
        """False if it is dead already."""
        if kind == SERVER:
            there = self.campaign.keeper.present.is_set()
            self.campaign.keeper.process.kill()
            return there
        rank = self.campaign.random.randrange(len(self.launchers))
        if rank in self.dead:
            return False
        launcher = self.launchers[rank]
        if kind == "stop":
            os.kill(launcher.process.pid, signal.SIGTERM)
            self.stopped, self.most = True, 0  # the last one of this start
        elif kind == "worker":
            os.kill(self.campaign.random.choice(launcher.workers()), signal.SIGKILL)
        else:
            self.dead.add(rank)
            if kind == "agent":
                os.kill(launcher.process.pid, signal.SIGKILL)
            else:
                launcher.kill()
            if kind == "machine":
                wipe(self.witness.memories[[*self.world][rank]])
        return True
