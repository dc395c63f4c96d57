"""A campaign of crashes: `python tests/crash_campaign.py --kills 200 --seed 1` (or `make crash-campaign N=200`).

Runs are trained under mingpt.launch by a number of processes that changes from start to start, while random processes,
all of a node's processes, or the agent get SIGKILL: at a random moment, or at a boundary of a snapshot's writes (before
and after each part, before and after the manifest). After each start every committed snapshot is good, and the newest
is no older than before. A run that has finished has the digest of one that nobody disturbed, and leaves no hot ones.
Prints a line for each start and a summary as JSON; ends with a stack trace and exit code 1 at the first violation.
"""

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from mingpt.snapshot.reader import read
from node_kit import Node
from run_kit import TINY, Run

HERE = Path(__file__).resolve().parent
OPTIONS = (
    "train.max_steps=200",
    "train.eval_every=0",
    "snapshot.asynchronous=true",
    "snapshot.every_steps=7",
    "snapshot.hot_every_steps=3",
    "snapshot.keep=3",
    "launch.max_attempts_without_progress=20",
)
BOUNDARIES = ("before-part", "after-part", "before-manifest", "after-manifest")


class Campaign:
    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.starts = self.runs = 0
        words = [self.random.choice(("king", "queen", "woe", "O", "men")) for _ in range(1500)]
        self.text = folder / "text.txt"
        self.text.write_text(" ".join(words))
        (folder / "memory").mkdir()
        reference = self.new_run("undisturbed")
        reference.finish(1, *OPTIONS, "snapshot.hot_every_steps=0")
        self.digest = reference.digest()

    def new_run(self, name: str) -> Run:
        return Run(str(self.folder / name), self.text, self.folder / "cache")

    def survive(self, run: Run, kills: int) -> None:
        """Train a run to its end through up to `kills` crashes."""
        newest = 0
        while True:
            left = kills - self.kills.total()
            code = self._start(run, left)
            steps = run.store.steps()
            if steps and steps[0] < newest:
                raise AssertionError(f"step {newest} was committed, and the newest one now is {steps[0]}")
            newest = steps[0] if steps else newest
            for step in steps:
                read(run.store, step)  # raises Damaged
            if code == 0:
                break
        self.runs += 1
        if (digest := run.digest()) != self.digest:
            raise AssertionError(f"{run.dir} ended with {digest}, and undisturbed it is {self.digest}")
        if left_behind := list((self.folder / "memory").glob("mingpt-*/*")):
            raise AssertionError(f"left in memory: {left_behind}")

    def _start(self, run: Run, left: int) -> int:
        """One life of the launcher; its exit code, None of which is final but 0."""
        chooser = self.random
        kind = chooser.choice(("worker", "node", "agent", "boundary")) if left > 0 else "none"
        env = {}
        once = self.folder / f"crash-{self.starts}"
        if kind == "boundary":
            kind = f"{chooser.choice(BOUNDARIES)}"
            env = {
                "PYTHONPATH": os.pathsep.join((str(HERE / "crash_site"), str(HERE.parent))),
                "CRASH_AT": f"{kind} {chooser.randint(1, 12)}",
                "CRASH_ONCE": str(once),
            }
        places = (f"run.dir={run.dir}", f"data.path={run.text}", f"data.cache_dir={run.cache}")
        processes = chooser.choice((1, 2, 3))
        node = Node(
            [
                *(sys.executable, "-m", "mingpt.launch", f"--nproc-per-node={processes}", *TINY, *OPTIONS, *places),
                f"snapshot.hot_dir={self.folder / 'memory'}",
            ],
            env,
        )
        self.starts += 1
        step_of_death = chooser.randint(1, 60)
        seen: list[int] = []

        def on_line(line: str) -> None:
            if not re.match(r"step +\d+/", line):
                return
            seen.append(1)
            if len(seen) != step_of_death or kind not in ("worker", "node", "agent"):
                return
            time.sleep(chooser.random() * 0.03)  # anywhere in a step
            try:
                if kind == "node":
                    node.kill()
                else:
                    workers = node.workers()
                    os.kill(chooser.choice(workers) if kind == "worker" else node.process.pid, signal.SIGKILL)
            except (ProcessLookupError, IndexError):
                return  # it was quicker
            self.kills[kind] += 1

        node.on_line = on_line
        code = node.wait()
        node.assert_nothing_left()
        if once.exists():
            self.kills[kind] += 1
        print(f"start {self.starts}: {processes} processes, {kind}, exit code {code}", flush=True)
        if code not in (0, -signal.SIGKILL):
            raise AssertionError(f"exit code {code}:\n{node.output[-5000:]}")
        return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), options.seed)
        while campaign.kills.total() < options.kills:
            campaign.survive(campaign.new_run(f"run-{campaign.runs + 1}"), options.kills)
    summary = {
        "kills": campaign.kills.total(),
        "by kind": dict(sorted(campaign.kills.items())),
        "runs finished with the undisturbed digest": campaign.runs,
        "starts": campaign.starts,
        "seed": options.seed,
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(summary, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
