"""`python benchmarks/observers.py [--steps 2000] [--block 20]`: what watching a run costs.

Trains `experiment=shakespeare_gpt2` in one process with everything on that watches: console lines, JSON lines, trace,
ledger, TensorBoard. In every second block of steps the events are kept from the observers. What costs a process in
each step (the read of its figures, the count of collectives), and the threads that write, are in both. The cost is the
median over pairs of neighbouring blocks of (mean step with them) / (mean step without) - 1: a machine whose speed
drifts slows both blocks of a pair alike.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from mingpt.observe.events import Event, Observers, StepDone
from mingpt.train import running
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime


class Switch(Observers):
    """Passes events on in every second block of steps, and notes when each step was done."""

    def __init__(self, inner: Observers, block: int) -> None:
        self.inner, self.block, self.on, self.at = inner, block, True, list[float]()

    def publish(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.on = len(self.at) // self.block % 2 == 0  # what this event costs is in the time to the next one
            self.at.append(time.perf_counter())
        if self.on or not isinstance(event, StepDone):
            self.inner.publish(event)


def measure(steps: int, block: int, text: Path, folder: str) -> list[float]:
    """(Mean step with observers) / (without), for each pair of neighbouring blocks but the first."""
    switches = list[Switch]()
    plain = running.open_observers

    def open_observers(*arguments: Any) -> Observers:
        switches.append(Switch(plain(*arguments), block))
        return switches[0]

    running.open_observers = open_observers  # type: ignore[assignment]
    arguments = [
        "experiment=shakespeare_gpt2",
        f"data.path={text}",
        f"run.dir={folder}/run",
        f"train.max_steps={steps}",
    ]
    arguments += ["track=[tensorboard]", "train.eval_every=0", "data.val_fraction=0", "train.log_every=10"]
    if code := attempt([*arguments, "snapshot.hot_every_steps=0", "snapshot.every_steps=0"], Lifetime()):
        raise SystemExit(f"the run ended with {code}")
    at = switches[0].at
    times = [after - before for before, after in pairwise(at)]
    blocks = [statistics.mean(times[i : i + block]) for i in range(0, len(times) - block, block)]
    return [on / off for on, off in zip(blocks[2::2], blocks[3::2], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--block", type=int, default=20, help="steps with observers, then as many without")
    parser.add_argument("--text", type=Path, default=Path("data/shakespeare.txt"))
    options = parser.parse_args()
    stdout, sys.stdout = sys.stdout, sys.stderr
    with tempfile.TemporaryDirectory() as folder:
        ratios = measure(options.steps, options.block, options.text, folder)
    sys.stdout = stdout
    quartiles = statistics.quantiles(ratios, n=4)
    print(
        json.dumps(
            {
                "pairs of blocks": len(ratios),
                "cost percent": round(100 * (statistics.median(ratios) - 1), 2),
                "quartiles": [round(100 * (q - 1), 2) for q in quartiles],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
