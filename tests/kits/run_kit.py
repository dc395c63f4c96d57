"""Helpers for tests that run the trainer as users do: real processes, real torchrun, real signals."""

import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec.config
from torch.distributed import TCPStore

from mingpt.cli.cli import main
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from tests.kits.node_kit import Node
from tests.kits.paths_kit import ROOT

TIME_LIMIT = 600  # seconds for one run; a hang fails the test instead of the whole suite

# Small enough for a step of milliseconds, with everything in it that could break bits: dropout, several layers, several
# microbatches a process, an evaluation whose last piece is not full.
TINY = (
    "model=gpt-nano",
    "model.n_layer=2",
    "model.n_embd=24",
    "model.block_size=16",
    "model.dropout=0.1",
    "batch.global_size=16",
    "batch.micro_size=2",
    "train.max_steps=24",
    "train.log_every=1",
    "train.eval_every=8",
    "schedule.warmup_steps=4",
    "schedule.decay_steps=24",  # a run that tests extend keeps its schedule
    "optimizer.lr=0.01",
    "snapshot.every_steps=4",
    "snapshot.every_seconds=0",
    "snapshot.keep=10",
    "snapshot.asynchronous=false",  # tests count on each of these snapshots
    "snapshot.hot_every_steps=0",
    "track=[]",
    "precision=fp32",  # whatever the experiment says: CPUs emulate bf16
)


@dataclass
class Run:
    """A training run in a folder of its own, to be started (again) in one or several processes."""

    dir: str
    text: Path
    cache: Path
    overrides: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, *overrides: str) -> list[str]:
        places = (f"run.dir={self.dir}", f"data.path={self.text}", f"data.cache_dir={self.cache}")
        given = [*self.overrides, *overrides]
        without = {key[1:] for key in given if key[0] == "~"}  # keys of TINY that this model does not have
        tiny = [o for o in TINY if o.partition("=")[0] not in without]
        given = [o for o in given if o[0] != "~"]
        return [*tiny, *places, *given]

    def command(self, world: int, *overrides: str, restarts: int = 0) -> list[str]:
        # -m torch.distributed.run is torchrun; one process alone needs no launcher.
        launcher = [
            "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", f"--max-restarts={restarts}",
        ] if world > 1 else []  # fmt: skip
        return [sys.executable, *launcher, "-m", "mingpt.train", *self.arguments(*overrides)]

    def start(self, world: int, *overrides: str, restarts: int = 0) -> Node:
        return Node(self.command(world, *overrides, restarts=restarts), self.env)

    def finish(self, world: int, *overrides: str) -> str:
        """Run to the end; returns the output. Fails the test unless it exits with 0.

        Without an agent, in processes that begin with torch imported, unless it has an environment of its own. What
        starts by `start` begins as users' runs do.
        """
        if not self.env:
            return warm(world, self.arguments(*overrides))
        started = self.start(world, *overrides)
        assert started.wait() == 0, started.output
        return started.output

    @property
    def store(self) -> Store:
        return Store(f"{self.dir}/snapshots")

    def digest(self) -> str:
        """The digest of the newest snapshot, every byte of which has been verified."""
        store = self.store
        return read(store, store.steps()[0]).manifest.digest


NewRun = Callable[..., Run]  # what the fixtures new_run and undisturbed are


# The trainer's modules, imported once for all runs of a process that tests: 1.2 CPU seconds a run in place of 4.4.
WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(["mingpt.train.attempt", "mingpt.train.assemble", "mingpt.data.text"])


def warm(world: int, arguments: list[str]) -> str:
    """Train to the end in forks of a process that has imported torch; returns the output."""
    return in_forks(world, train_in_fork, arguments)


def in_forks(world: int, act: Callable[[Any], object], given: Any, nodes: int = 1) -> str:
    """What so many processes say that call `act(given)`, and fails unless all end with 0.

    They find each other in a store of this process, as those that torchrun starts do in its agent's.
    """
    each, store = world // nodes, TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    meet = {"WORLD_SIZE": f"{world}", "LOCAL_WORLD_SIZE": f"{each}", **there}
    own = [{"RANK": f"{r}", "LOCAL_RANK": f"{r % each}"} | meet if world > 1 else {} for r in range(world)]
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        workers = [WARM.Process(target=act_in_fork, args=(act, given, os.environ | o, output.name)) for o in own]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(TIME_LIMIT)
            worker.kill()  # nothing if it has ended
        codes = [worker.exitcode for worker in workers]
        said = output.read()
        assert codes == [0] * world, f"exit codes {codes}:\n{said}"
        return said


def act_in_fork(act: Callable[[Any], object], given: Any, environ: Mapping[str, str], output: str) -> None:
    """Act in a fork, with this environment and with its output in this file, and end the process."""
    out = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.clear()
    os.environ.update(environ)
    fsspec.config.set_conf_env(fsspec.config.conf)  # as at its import, which is past
    gc.freeze()  # what torch consists of is no garbage: a run looks for some at its end
    act(given)
    sys.stdout.flush()
    os._exit(0)  # as mingpt.train ends (cli.py): gloo's threads must not meet Python's shutdown


def train_in_fork(arguments: list[str]) -> None:
    """Train with these arguments, as mingpt.train."""
    sys.argv = ["mingpt.train", *arguments]
    main("train")


def train(folder: Path, *arguments: str, path: Path = ROOT, **variables: str) -> "subprocess.CompletedProcess[str]":
    """`python -m mingpt.train` in a folder, to its end, whatever that is."""
    return subprocess.run(
        [sys.executable, "-m", "mingpt.train", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(path), **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
