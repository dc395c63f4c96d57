"""`python benchmarks/snapshot_overhead.py [--steps 200] [--every 10 100] [--batch 8]`: snapshots' share of the time.

Trains 30M parameters with two processes under mingpt.launch, with a hot snapshot every 10 steps and a durable one every
100, and measures each step by the time between the lines that the run prints.

A snapshot is written while the next steps run. So of each 10 steps the first 5 may be slower, and the last 5 are quiet.
The overhead is (mean of all steps) / (mean of the quiet steps) - 1. Both come from one run, so that a machine whose
speed drifts slows both alike.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise

MODEL = [
    "model.n_layer=6", "model.n_head=6", "model.n_embd=384", "model.block_size=256", "model.vocab_multiple=50304",
    "data=shakespeare-complete", "batch.micro_size=4",
]  # fmt: skip


def step_times(options: argparse.Namespace, folder: str) -> list[float]:
    """Seconds of each step but the first, which is a warm-up."""
    hot, durable = options.every
    command = [
        *(sys.executable, "-m", "mingpt.launch", "--nproc-per-node=2", *MODEL, f"run.dir={folder}/run"),
        f"batch.global_size={options.batch}",
        *(f"train.max_steps={options.steps + 1}", "train.log_every=1", "train.eval_every=0", "data.val_fraction=0"),
        *(f"snapshot.hot_every_steps={hot}", f"snapshot.every_steps={durable}", "snapshot.every_seconds=0"),
    ]
    at: list[float] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if re.match(r"step +\d+/", line):
                at.append(time.perf_counter())
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}")
    return [after - before for before, after in pairwise(at)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, nargs=2, default=(10, 100), metavar=("HOT", "DURABLE"))
    parser.add_argument("--batch", type=int, default=8, help="samples of 256 tokens in a step")
    options = parser.parse_args()
    hot = options.every[0]
    with tempfile.TemporaryDirectory() as folder:
        times = step_times(options, folder)
    # times[i] is the time of step i + 2. A step's line is printed before its snapshot: the next step pays for the copy.
    quiet = [t for i, t in enumerate(times) if i + 2 > hot and (i + 1) % hot >= hot // 2]
    usual = statistics.median(quiet)
    overhead = statistics.mean(times) / statistics.mean(quiet) - 1
    by_place = [statistics.median(times[(k - 2) % hot :: hot]) / usual for k in range(1, hot + 1)]
    print(
        json.dumps(
            {
                "steps": len(times),
                "tokens a step": options.batch * 256,
                "hot every": hot,
                "durable every": options.every[1],
                "quiet step seconds": round(usual, 3),
                "overhead percent": round(100 * overhead, 2),
                "step / quiet step, by steps after a hot snapshot": [round(r, 3) for r in by_place],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
