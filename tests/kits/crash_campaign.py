"""A campaign of crashes: `make crash-campaign N=200 SEED=1`, or this file with `--kills 200 --seed 1`.

Runs are trained under mingpt.launch, on a disk or in a bucket, on one node, the other, or both, by a number of
processes that changes from start to start. Meanwhile random processes, all processes of a node, the agent or the
storage server get SIGKILL: at a random moment, or at a boundary of a snapshot's writes (before and after each part,
before and after the manifest, in both tiers); those that nobody visited yet come first. After each start the witness
looks for what was lost (crash_witness.py), and a run that has finished has the digest of one that nobody disturbed.
Prints a line for each start and a summary as JSON; ends with a stack trace and exit code 1 at the first violation.
"""

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

import crash_report
from crash_plan import ROLLBACK, Plan, Story
from crash_server import Keeper
from crash_start import Start
from crash_witness import Witness
from mingpt.snapshot.reader import read
from mingpt.snapshot.retention import Retention
from paths_kit import CRASH_SITE, ROOT
from run_kit import TINY, Run

KEEP, KEEP_EVERY = 3, 28
OPTIONS = (
    "train.max_steps=120",
    "train.eval_every=0",
    "snapshot.asynchronous=true",
    "snapshot.every_steps=7",
    "snapshot.hot_every_steps=3",
    f"snapshot.keep={KEEP}",
    f"snapshot.keep_every={KEEP_EVERY}",
    "snapshot.retry_seconds=3",
    "world.init_timeout_seconds=40",  # other work may share the machine
    "world.timeout_seconds=60",
    "launch.max_attempts_without_progress=8",
)
STORE_SECONDS = "5"  # for one operation of the store, in all processes
PART_BYTES = "40000"  # so that there are some


class Campaign:
    def __init__(self, folder: Path, memory: Path, seed: int, kills: int) -> None:
        """kills: 0 for a short story, the same each time."""
        self.folder, self.random = folder, random.Random(seed)
        self.memories = [memory / "node-0", folder / "node-1"]
        for own in self.memories:
            own.mkdir()
        self.attempts = 0
        self.runs: Counter[str] = Counter()
        self.worlds: Counter[str] = Counter()
        words = [self.random.choice(("king", "queen", "woe", "O", "men")) for _ in range(1500)]
        self.text = folder / "text.txt"
        self.text.write_text(" ".join(words))
        self.env = {
            "PYTHONPATH": os.pathsep.join((str(CRASH_SITE), str(ROOT))),
            "CRASH_AT": str(folder / "crash-at"),
            "CRASH_SERVER": str(folder / "server-pid"),
            "CRASH_PART_BYTES": PART_BYTES,
            "MINGPT_RDZV_SECRET": secrets.token_hex(),
        }
        os.environ["MINGPT_STORE_SECONDS"] = STORE_SECONDS
        reference = Run(str(folder / "undisturbed"), self.text, folder / "cache", env=self.env)
        every = ("snapshot.every_steps=1", "snapshot.keep=1000", "snapshot.asynchronous=false")
        self.options = OPTIONS if kills else (*OPTIONS, "train.max_steps=80")
        reference.finish(1, *self.options, *every, "snapshot.hot_every_steps=0")
        manifests = [read(reference.store, step).manifest for step in reference.store.steps()]
        self.undisturbed = {manifest.step: manifest.digest for manifest in manifests}
        parts = {name.rpartition("-")[0] for name in manifests[0].parts}
        self.plan = (Plan if kills else Story).of(kills, self.random, parts)
        self.keeper = Keeper(folder, seed)

    def survive(self, storage: str) -> None:
        """Train a run to its end through crashes."""
        name = f"run-{self.runs.total() + 1}"
        place = str(self.folder) if storage == "disk" else self.keeper.server.url
        run = Run(f"{place}/{name}", self.text, self.folder / "cache")
        witness = Witness(run, self.undisturbed, Retention(KEEP, KEEP_EVERY), self.memories)
        while True:
            if witness.seen and self.plan.left and self.random.random() < 0.15:  # somebody is not content with the run
                witness.rewind(self.random.choice(run.store.steps()))
                self.plan.count(ROLLBACK)
            start = self._prepare(witness, storage)
            codes, nodes = self._run(start), start.nodes
            if start.double:
                nodes = [node for node, code in zip(start.nodes, codes, strict=True) if code == 0][-1:]
                codes = [0]
            if not any(codes) and max(witness.seen) == max(self.undisturbed):
                break
        witness.at_the_end(nodes)
        self.runs[storage] += 1
        self.attempts += witness.attempts

    def _prepare(self, witness: Witness, storage: str) -> Start:
        run, plan = witness.run, self.plan
        nodes, processes = plan.world()
        places = (f"run.dir={run.dir}", f"data.path={run.text}", f"data.cache_dir={run.cache}", "snapshot.hot_dir=.")
        crashes = plan.crashes(storage)
        training = [*TINY, *self.options, *places, f"snapshot.grace_seconds={self.random.choice((0, 0.000001, 5))}"]
        double = crashes > 0 and storage == "bucket" and self.random.random() < 0.12
        if double:
            nodes, processes, crashes = (0, 1), [1, 1], 0
            witness.doubled = True
        return Start(
            nodes, processes, crashes, training, self.env, witness, plan, storage, self.keeper, self.random, double
        )

    def _run(self, start: Start) -> list[int]:
        began = time.monotonic()
        start.witness.expect_start(start.nodes)
        try:
            codes = start.run()
            self.keeper.come_back()
            start.witness.examine()
        except BaseException:
            print(start.output, file=sys.stderr)
            raise
        world = "+".join(map(str, start.processes))
        self.worlds[world] += 1
        print(
            f"start {self.worlds.total()}: {start.storage}, nodes {start.nodes}, {world} processes, {start.happened}, "
            f"exit codes {codes}, {time.monotonic() - began:.0f} s, {self.plan.left} left",
            flush=True,
        )
        return codes

    def figures(self) -> dict[str, Any]:
        return {
            "kills": self.plan.kinds.total(),
            "starts": self.worlds.total(),
            "attempts": self.attempts,
            "by kind": dict(sorted(self.plan.kinds.items())),
            "runs finished with the undisturbed digest": dict(sorted(self.runs.items())),
            "starts by processes": dict(sorted(self.worlds.items())),
            "boundaries": crash_report.boundaries(self.plan),
            "digest": self.undisturbed[max(self.undisturbed)],
        }

    def run(self) -> None:
        while self.plan.left:
            self.survive(self.plan.storage())


@contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """One on a disk and one in memory: two nodes that have theirs on two file systems are told apart by that.

    After a violation they stay, for a look.
    """
    disk, memory = Path(tempfile.mkdtemp(prefix="crashes-")), Path(tempfile.mkdtemp(prefix="crashes-", dir="/dev/shm"))
    assert disk.stat().st_dev != memory.stat().st_dev, f"{disk} and {memory} are on one file system"
    try:
        yield disk, memory
    except BaseException:
        print(f"what there was is in {disk} and {memory}", file=sys.stderr)
        raise
    for folder in (disk, memory):
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="0: a short story, the same each time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="a Markdown file to write")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to stop"))  # and take all processes along
    began = time.monotonic()
    with folders() as (disk, memory):
        campaign = Campaign(disk, memory, options.seed, options.kills)
        with closing(campaign.keeper):
            campaign.run()
    command = {"command": f"make crash-campaign N={options.kills} SEED={options.seed}", "torch": torch.__version__}
    figures = campaign.figures() | command | {"seconds": round(time.monotonic() - began)}
    print(json.dumps(figures, indent=1))
    if options.report:
        options.report.write_text(crash_report.markdown(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
