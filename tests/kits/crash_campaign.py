"""A campaign of crashes: `make crash-campaign N=200 SEED=1`, or `python -m tests.kits.crash_campaign --kills 200`.

Runs are trained under mingpt.launch, on a disk or in a bucket, on one node, the other, or both, by a number of
processes that changes from start to start. Meanwhile random processes, all processes of a node, the agent or the
storage server get SIGKILL: at a random moment, or at a boundary of a snapshot's writes (before and after each part,
before and after the manifest, in both tiers). After each start the witness looks for what was lost (crash_witness.py),
and a run that has finished has the digest of one that nobody disturbed. Before some starts somebody goes back to an
older step. docs/faults.md has the rules.

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
import time
from collections import Counter
from contextlib import closing
from itertools import cycle
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from mingpt.snapshot.reader import read
from mingpt.snapshot.retention import Retention
from tests.kits.crash_plan import DOUBLE, Plan
from tests.kits.crash_start import Keeper, Start
from tests.kits.crash_witness import Witness
from tests.kits.paths_kit import CRASH_SITE, ROOT
from tests.kits.run_kit import Run

RETENTION = Retention(keep=3, keep_every=28)
OPTIONS = (
    "train.eval_every=0",
    "snapshot.asynchronous=true",
    "snapshot.every_steps=7",
    "snapshot.hot_every_steps=3",
    f"snapshot.keep={RETENTION.keep}",
    f"snapshot.keep_every={RETENTION.keep_every}",
    "snapshot.retry_seconds=3",
    "snapshot.hot_dir=.",
    "world.init_timeout_seconds=40",  # other work may share the machine
    "world.timeout_seconds=60",
    "launch.max_attempts_without_progress=8",
)
# How many processes each node has.
WORLDS = ({0: 1}, {0: 2}, {1: 1}, {0: 1, 1: 1}, {1: 3}, {0: 2, 1: 1}, {0: 4}, {0: 1, 1: 2}, {1: 2})


class Campaign:
    """Runs that are trained through crashes until each crash of the plan has happened."""

    def __init__(self, folder: Path, memory: Path, seed: int, kills: int) -> None:
        """kills: 0 for a short story, the same each time.

        folder and memory: two nodes that have theirs on two file systems are told apart by that.
        """
        self.folder, self.random = folder, random.Random(seed)
        self.memories = [memory / "node-0", folder / "node-1"]
        for own in self.memories:
            own.mkdir()
        self.attempts = 0
        self.runs, self.starts = Counter[str](), Counter[str]()
        self.worlds = cycle(WORLDS if kills else WORLDS[:2])
        self.text = folder / "text.txt"
        self.text.write_text(" ".join(self.random.choices(("king", "queen", "woe", "O", "men"), k=1500)))
        self.armed, pid_file = folder / "crash-at", folder / "server-pid"
        self.env = {
            "PYTHONPATH": os.pathsep.join((str(CRASH_SITE), str(ROOT))),
            "CRASH_AT": str(self.armed),
            "CRASH_SERVER": str(pid_file),
            "CRASH_PART_BYTES": "40000",  # so that there are some parts
            "MINGPT_RDZV_SECRET": secrets.token_hex(),
        }
        os.environ["MINGPT_STORE_SECONDS"] = "20"  # for one operation of the store, in all processes
        reference = Run(str(folder / "undisturbed"), self.text, folder / "cache", env=self.env)
        self.options = (*OPTIONS, f"train.max_steps={120 if kills else 80}")
        every = ("snapshot.every_steps=1", "snapshot.keep=1000", "snapshot.asynchronous=false")
        reference.finish(1, *self.options, *every, "snapshot.hot_every_steps=0")
        manifests = [read(reference.store, step).manifest for step in reference.store.steps()]
        self.undisturbed = {manifest.step: manifest.digest for manifest in manifests}
        self.plan = Plan(kills, self.random, {name.rpartition("-")[0] for name in manifests[0].parts})
        self.keeper = Keeper(folder / "store", pid_file, random.Random(seed))

    def survive(self, storage: str) -> None:
        """Train a run to its end through crashes."""
        place = str(self.folder) if storage == "disk" else self.keeper.server.url
        run = Run(f"{place}/run-{self.runs.total()}", self.text, self.folder / "cache")
        witness = Witness(run, self.undisturbed, RETENTION, self.memories)
        codes = [1]
        while any(codes) or max(witness.seen) < max(self.undisturbed):
            if witness.seen and self.plan.left and self.random.random() < 0.15:  # somebody is not content with the run
                witness.rewind(self.random.choice(run.store.steps()))
                self.plan.count(storage, "rollback")
            double, world = self.plan.upcoming(storage)[:1] == [DOUBLE], next(self.worlds)
            grace = f"snapshot.grace_seconds={self.random.choice((0, 0.000001, 5))}"
            start = Start(
                self,
                witness,
                storage,
                {0: 1, 1: 1} if double else world,
                run.arguments(*self.options, grace),
                0 if double else self.random.choice((2, 4, 6)),
                double,
            )
            codes, nodes = self._run(start), [*start.world]
            if double:
                nodes = [node for node, code in zip(nodes, codes, strict=True) if code == 0][-1:]
                codes = [0]
        witness.at_the_end(nodes)
        self.runs[storage] += 1
        self.attempts += witness.attempts

    def _run(self, start: Start) -> list[int]:
        began = time.monotonic()
        start.witness.doubled = start.double
        start.witness.expect_start(start.world)
        try:
            codes = start.run()
            self.keeper.come_back()
            start.witness.examine()
        except BaseException:
            print(start.output, file=sys.stderr)
            raise
        self.starts["+".join(map(str, start.world.values()))] += 1
        print(
            f"start {self.starts.total()}: {start.storage}, processes by node {start.world}, {start.happened}, "
            f"exit codes {codes}, {time.monotonic() - began:.0f} s, {len(self.plan.left)} left",
            flush=True,
        )
        return codes

    def run(self) -> dict[str, Any]:
        while self.plan.left:
            self.survive(self.plan.left[0][0])
        return {
            "kills": self.plan.happened.total(),
            "starts": self.starts.total(),
            "attempts": self.attempts,
            "crashes": dict(sorted(self.plan.happened.items())),
            "runs finished with the undisturbed digest": self.runs,
            "starts by processes": self.starts,
            "digest": self.undisturbed[max(self.undisturbed)],
            "torch": torch.__version__,
        }


def main() -> None:
    """Run a campaign, as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="0: a short story, the same each time")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to stop"))  # and take all processes along
    began = time.monotonic()
    disk, memory = (Path(mkdtemp(prefix="crashes-", dir=place)) for place in (None, "/dev/shm"))
    print(f"what there is stays in {disk} and {memory} after a violation", flush=True)
    assert disk.stat().st_dev != memory.stat().st_dev, "they are on one file system"
    campaign = Campaign(disk, memory, options.seed, options.kills)
    with closing(campaign.keeper):
        figures = campaign.run()
    print(json.dumps(figures | {"seconds": round(time.monotonic() - began)}, indent=1))
    for folder in (disk, memory):
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
