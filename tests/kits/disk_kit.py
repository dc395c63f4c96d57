"""Machines with a disk, a memory and a host name of their own, all on this one and in its network.

A machine is a mount and a uts namespace, which live as long as a process that waits for the end of a pipe from here.
Its /dev/shm is its own, and outlives what runs there, as a machine's memory does. Its disk is a folder, in which its
processes start: `run.dir=runs/x` is another place on each. (net_kit's hosts have networks of their own, and share
disks.)

    with machines(tmp_path, "a", "b") as (a, b):
        ended = train([(b, 2), (a, 1)], run.arguments())  # torchrun's order of nodes, and the processes of each
        head = Node([*a.enter(), sys.executable, …])  # node_kit's
"""

import ctypes
import glob
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed import TCPStore

from mingpt.snapshot.format import MANIFEST
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from mingpt.train import loop
from mingpt.train.context import StepContext
from mingpt.world import joining
from mingpt.world.world import World
from tests.kits.node_kit import wait_until
from tests.kits.run_kit import TIME_LIMIT, WARM, act_in_fork, train_in_fork

RUN = "runs/x"  # run.dir: relative, so that each machine has a folder of its own
SHAPE = "nodes and processes on each, as rank {rank} sees them: {shape}"
OPENED = "opened: "  # and a path; a random name is an asterisk
# Without its name in /etc/hosts, gloo would ask the DNS for it.
SET_UP = """set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
echo ready
cat >/dev/null"""


class Machine:
    """disk: a folder; two machines with the same one share it, as over NFS. umask: tells whose a file is."""

    def __init__(self, name: str, disk: Path) -> None:
        self.name, self.disk, self.umask = name, disk, 0o022
        disk.mkdir(exist_ok=True)
        hosts = disk.with_name(f"hosts-of-{name}")
        hosts.write_text(f"127.0.0.1 localhost {name}\n")
        command = ["unshare", "--mount", "--uts", "sh", "-c", SET_UP, "sh", name, str(hosts)]
        self._keeper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._keeper.stdout
        assert self._keeper.stdout.readline() == b"ready\n", command

    def end(self) -> None:
        """Its memory is gone, its disk is there."""
        self._keeper.communicate(timeout=TIME_LIMIT)

    def enter(self) -> list[str]:
        """What stands before a command that is to run on this machine, on its disk."""
        return ["nsenter", f"--target={self._keeper.pid}", "--mount", "--uts", f"--wdns={self.disk}", "--"]

    @property
    def namespaces(self) -> list[str]:
        return [f"/proc/{self._keeper.pid}/ns/{kind}" for kind in ("uts", "mnt")]

    @property
    def memory(self) -> Path:
        """Its /dev/shm, as this process can read it."""
        return Path(f"/proc/{self._keeper.pid}/root/dev/shm")

    def files(self) -> dict[str, bytes]:
        """All files on its disk."""
        return {str(path.relative_to(self.disk)): path.read_bytes() for path in self.disk.rglob("*") if path.is_file()}

    def hot_files(self) -> dict[str, bytes]:
        """All files in its memory."""
        found = self.memory.rglob("*")
        return {str(path.relative_to(self.memory)): path.read_bytes() for path in found if path.is_file()}

    def hot_steps(self) -> list[int]:
        """The hot snapshots in its memory, of all runs."""
        return [step for folder in self.memory.glob("mingpt-*/*") for step in Store(str(folder)).steps()]

    @property
    def store(self) -> Store:
        return Store(f"{self.disk}/{RUN}/snapshots")

    def digests(self) -> dict[int, str]:
        """The digest of each snapshot on its disk, every byte of which has been verified."""
        return {step: read(self.store, step).manifest.digest for step in self.store.steps()}


@contextmanager
def machines(folder: Path, *names: str) -> Iterator[list[Machine]]:
    """Make a machine for each name; all end with the block."""
    with ExitStack() as stack:
        made = list[Machine]()
        for name in names:
            made.append(Machine(name, folder / f"disk-of-{name}"))
            stack.callback(made[-1].end)
        yield made


@dataclass(frozen=True)
class Ended:
    """How the processes ended, node by node as they were given; and what the processes of each machine have said."""

    codes: list[list[int]]
    said: dict[str, str]

    @property
    def output(self) -> str:
        return "".join(f"--- {name}\n{text}" for name, text in self.said.items())


Nodes = Sequence[tuple[Machine, int]]


def train(
    nodes: Nodes, arguments: Sequence[str], *, head: Machine | None = None, killed_after: int | None = None
) -> Ended:
    """`mingpt train` on these machines, in the order that torchrun gave them, in forks of a process that has torch.

    head: the one that SkyPilot calls node 0; None: without SkyPilot. killed_after: all processes are killed after this
    step, and once it is in the memory of each. Each process says the shape of its world (SHAPE), and what it opens.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size = sum(each for _, each in nodes)
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    outputs = {machine.name: machine.disk.parent / f"output-of-{machine.name}" for machine, _ in nodes}
    for output in outputs.values():
        output.write_text("")
    started, rank = list[list[Any]](), 0
    for number, (machine, each) in enumerate(nodes):
        started.append([])
        for local in range(each):
            own = {
                "RANK": f"{rank}", "WORLD_SIZE": f"{size}", "LOCAL_RANK": f"{local}", "LOCAL_WORLD_SIZE": f"{each}",
                "GROUP_RANK": f"{number}", "GROUP_WORLD_SIZE": f"{len(nodes)}",
            } | meet | (_skypilot(nodes, machine, head) if head else {})  # fmt: skip
            act = partial(_on_machine, machine.namespaces, str(machine.disk), machine.umask, killed_after)
            given = act, list(arguments), os.environ | own, str(outputs[machine.name])
            started[-1].append(WARM.Process(target=act_in_fork, args=given))
            rank += 1
    for process in (p for node in started for p in node):
        process.start()
    for process in (p for node in started for p in node):
        process.join(TIME_LIMIT)
        process.kill()  # nothing if it has ended
    codes = [[process.exitcode for process in node] for node in started]
    return Ended(codes, {name: output.read_text(errors="replace") for name, output in outputs.items()})


def _skypilot(nodes: Nodes, machine: Machine, head: Machine) -> dict[str, str]:
    order = sorted((one for one, _ in nodes), key=lambda one: one is not head)
    addresses = "\n".join(f"127.0.0.{number}" for number in range(1, len(nodes) + 1))
    numbers = {"SKYPILOT_NODE_RANK": f"{order.index(machine)}", "SKYPILOT_NUM_NODES": f"{len(nodes)}"}
    return numbers | {"SKYPILOT_NODE_IPS": addresses}


def _on_machine(namespaces: list[str], disk: str, umask: int, killed_after: int | None, arguments: list[str]) -> None:
    """Train on a machine. What has forked this process has one thread, or the kernel would refuse."""
    library = ctypes.CDLL(None, use_errno=True)
    for path in namespaces:
        with Path(path).open() as namespace:
            assert library.setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
    os.chdir(disk)
    os.umask(umask)
    by_nodes, train_step = joining.by_nodes, loop.train_step

    def told(world: World, *rest: Any) -> World:
        made = by_nodes(world, *rest)
        print(SHAPE.format(rank=made.rank, shape=made.shape), file=sys.stderr, flush=True)
        return made

    def step_or_end(context: StepContext, done: int, *rest: Any) -> Any:
        if done == killed_after:
            hot = f"/dev/shm/mingpt-*/*/step-{done:09d}/{MANIFEST}"
            wait_until(lambda: glob.glob(hot), f"step {done} is in memory", 60)
            context.world.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(context, done, *rest)

    def opened(event: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[0] if event == "open" and isinstance(arguments[0], str) else "/"
        if RUN in path or not os.path.isabs(path):  # relative ones are below an open folder
            print(f"{OPENED}{re.sub('[0-9a-f]{32}', '*', os.path.relpath(path, disk))}", file=sys.stderr, flush=True)

    sys.addaudithook(opened)
    with patch("mingpt.world.joining.by_nodes", told), patch("mingpt.train.loop.train_step", step_or_end):
        train_in_fork(arguments)
