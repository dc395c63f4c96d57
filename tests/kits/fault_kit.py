"""Two nodes that train together under one of the three launchers, or one node, for tests that break them."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.kits.disk_kit import Machine
from tests.kits.node_kit import Node, free_port
from tests.kits.run_kit import Run

LAUNCHERS = ("torchrun static", "torchrun c10d", "mingpt.launch static", "mingpt.launch c10d")
STEPS = 150
LONG = (f"train.max_steps={STEPS}", "train.eval_every=0", "snapshot.every_steps=20", "snapshot.keep=20")
# Short, so that a test that waits for one of them ends soon; no test needs the difference to be long.
LIMITS = (
    "world.timeout_seconds=60",  # gloo may miss that a peer has gone: docs/faults.md
    "launch.max_attempts_without_progress=2",
    "launch.shutdown_timeout_seconds=30",  # in them a starved process stores its snapshot
)
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


@dataclass
class Cluster:
    """Node 0 hosts the store, at 127.0.0.1; node 1 is at 127.0.0.2.

    machines: with disks of their own, one for each node; none: the nodes share all. least: nodes that are enough.
    """

    launcher: str
    run: Run
    processes: tuple[int, int] = (1, 1)
    meet_seconds: int = 300  # how long each process waits for the others: less where one never comes
    nodes: list[Node] = field(default_factory=list)
    on_step: Callable[[int], None] = lambda step: None
    machines: Sequence[Machine] = ()
    least: int = 2

    def command(self, rank: int, port: int) -> list[str]:
        address, nproc = f"127.0.0.{rank + 1}", self.processes[rank]
        trainer = training(self.run, *LIMITS, f"world.init_timeout_seconds={self.meet_seconds}")
        c10d = [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test", f"--local-addr={address}"]
        inside = self.machines[rank].enter() if self.machines else []
        nodes = "--nnodes=2" if self.least == 2 else f"--nnodes={self.least}:2"
        if self.launcher.startswith("mingpt.launch"):
            place = [*c10d, f"--node-rank={rank}", f"--rdzv-backend={self.launcher.split()[1]}"]
            place += ["--rdzv-conf=last_call_timeout=3"] if self.least < 2 else []
            options = [nodes, f"--nproc-per-node={nproc}", *place]
            return [*inside, sys.executable, "-m", "mingpt.launch", *options, *trainer]
        options = [nodes, f"--nproc-per-node={nproc}", "--max-restarts=1", "--shutdown-timeout=30"]
        options += [f"--signals-to-handle={SIGNALS}"]
        if self.launcher == "torchrun static":
            options += ["--master-addr=127.0.0.1", f"--master-port={port}", f"--node-rank={rank}"]
        else:
            hosting = f"is_host={'true' if rank == 0 else 'false'}"
            waits = f"{hosting},join_timeout={self.meet_seconds},read_timeout=60"
            options += [*c10d, "--rdzv-backend=c10d", f"--rdzv-conf={waits}"]
        return [*inside, sys.executable, "-m", "torch.distributed.run", *options, "-m", "mingpt.train", *trainer]

    def start(self) -> None:
        port = free_port()
        self.nodes = []
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        for rank in (0, 1):  # at once: what they wait for each other has limits, and torch's import takes long
            self.nodes.append(Node(self.command(rank, port), env, on_step=self.on_step))

    def wait(self) -> tuple[int, int]:
        """The exit codes of the two nodes, after proving that nothing of them is left."""
        head, other = (node.wait() for node in self.nodes)
        for node in self.nodes:
            node.assert_nothing_left()
        return head, other

    @property
    def output(self) -> str:
        return "".join(f"--- node {rank}\n{node.output}" for rank, node in enumerate(self.nodes))

    def resumed_from(self) -> list[int]:
        return [int(step) for step in re.findall(r"resumed from step (\d+) of ", self.output)]


# --- one node, under mingpt.launch ---


def training(run: Run, *overrides: str) -> list[str]:
    """The arguments of a training that is LONG enough to be broken."""
    return run.arguments(*LONG, *overrides)


def launch(run: Run, *overrides: str, options: tuple[str, ...] = ("--nproc-per-node=2",)) -> list[str]:
    """The command that trains a run under mingpt.launch, on one node."""
    return [sys.executable, "-m", "mingpt.launch", *options, *training(run, *overrides)]


def at_step(wanted: int, act: Callable[[], None]) -> Callable[[str], None]:
    """A reader of lines that acts once, at the first line of a step from `wanted` on."""
    done: list[int] = []

    def on_line(line: str) -> None:
        if (match := re.match(r"step +(\d+)/", line)) and int(match[1]) >= wanted and not done:
            done.append(1)
            act()

    return on_line


def finish(node: Node, expected: int) -> str:
    """The output of a command that must end with this code, and leave nothing behind."""
    code = node.wait()
    assert code == expected, node.output[-6000:]
    node.assert_nothing_left()
    return node.output
