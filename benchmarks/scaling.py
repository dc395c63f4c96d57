"""`sudo python benchmarks/scaling.py`: what a step, a snapshot and a start cost as the world grows.

Sixteen processes share the cores of one machine, so seconds on a clock say nothing: it counts CPU seconds of all
processes, and bytes between them (each run has a network namespace of its own, hence root). Each figure is the
difference of two runs, which differ in one thing. Straight lines are fitted to worlds of 1, 2 and 4, and checked
against those of 8 and 16; bytes are computed, and checked against all.

A last part checks the model of failures: the seconds that one SIGKILL costs are measured, and predict a run with three.
Prints JSON.
"""

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mingpt.compute.buckets import make_buckets
from mingpt.compute.exchange import subtrees_by_rank
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.world.world import World

WORLDS, FITTED, MICROBATCHES, STEPS = (1, 2, 4, 8, 16), (1, 2, 4), 16, 10
SETTINGS = (
    "model=gpt2", "model.n_layer=4", "model.n_head=4", "model.n_embd=256", "model.block_size=64", "model.dropout=0",
    "batch.micro_size=2", f"batch.global_size={2 * MICROBATCHES}", "train.eval_every=0", "data.val_fraction=0",
    "schedule.decay_steps=99", "snapshot.every_seconds=0", "snapshot.hot_every_steps=0", "snapshot.asynchronous=false",
)  # fmt: skip


def measure(world: int, text: Path, *settings: str) -> tuple[float, int]:
    """(CPU seconds of all its processes, bytes that they sent) of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"),
            *("-m", "mingpt.train", *SETTINGS, f"data.path={text}", f"run.dir={folder}", *settings),
        ]
        inside = 'ip link set lo up && "$@" >"$0/log" 2>&1 && cat /proc/net/dev || { tail "$0/log" >&2; exit 1; }'
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            ["unshare", "--net", "sh", "-c", inside, folder, *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = re.search(r"lo:\s*(\d+)", done.stdout)
        assert found
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, int(found[1])


def costs(world: int, text: Path, rounds: int) -> dict[str, float]:
    """CPU seconds of a step, a snapshot and a start; bytes of a step. The least of the rounds: noise only adds."""
    steps, found = (2, 2 + STEPS), dict[str, list[float]]()
    for _ in range(rounds):
        (short, few), (long, many) = (measure(world, text, f"train.max_steps={n}") for n in steps)
        stored, _ = measure(world, text, f"train.max_steps={steps[1]}", "snapshot.every_steps=1")
        step = (long - short) / STEPS
        rows = {"step": step, "start": short - steps[0] * step, "bytes": (many - few) / STEPS}
        rows["snapshot"] = (stored - long) / (steps[1] - 1)
        for name, value in rows.items():
            found.setdefault(name, []).append(value)
    return {name: min(values) for name, values in found.items()}


def bytes_of_a_step(world: int) -> float:
    """Each partial sum goes in slices to all others; each process's slice of the weights goes to all others."""
    rows = sum(map(len, subtrees_by_rank(1, world, MICROBATCHES)[0]))
    model = GPT(GPTConfig(vocab_size=65, block_size=64, n_layer=4, n_head=4, n_embd=256, dropout=0.0))
    alone = World(0, world, 0, torch.device("cpu"), "")
    slices = sum(bucket.length for bucket in make_buckets(model.named_parameters(), set(), alone, True))
    return 4 * slices * (rows + world) * (world - 1)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(slope, height) of least squares."""
    n, x, y = len(points), sum(x for x, _ in points), sum(y for _, y in points)
    slope = (n * sum(a * b for a, b in points) - x * y) / (n * sum(a * a for a, _ in points) - x * x)
    return slope, (y - slope * x) / n


def killed(text: Path, kills: int) -> float:
    """Seconds of a run of two processes, one of which is killed after the steps 20, 40, … (`kills` times)."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "mingpt.launch", "--nproc-per-node=2", *SETTINGS, f"data.path={text}"),
            *(f"run.dir={folder}", "train.max_steps=80", "train.log_every=1", "snapshot.every_steps=10"),
        ]
        began, at = time.monotonic(), [20 * (i + 1) + 5 for i in range(kills)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout
            for said in process.stdout:
                if at and re.match(rf"step +{at[0]}/", said):
                    at.pop(0)
                    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                    os.kill(int(children[-1]), signal.SIGKILL)
        assert process.returncode == 0
        return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        (text := Path(name, "text.txt")).write_text("".join(map(chr, range(32, 97))) * 900)
        found = {}
        for world in WORLDS:
            found[world] = costs(world, text, rounds)
            print(json.dumps({"processes": world, **{k: round(v, 3) for k, v in found[world].items()}}), flush=True)
        fits: dict[str, Any] = {}
        for what in ("step", "start", "snapshot"):
            slope, height = line([(w, found[w][what]) for w in FITTED])
            errors = {w: round((slope * w + height) / found[w][what] - 1, 3) for w in WORLDS if w not in FITTED}
            fits[what] = {"each process": round(slope, 4), "the rest": round(height, 4), "error": errors}
        fits["bytes"] = {"error": {w: round(bytes_of_a_step(w) / found[w]["bytes"] - 1, 3) for w in WORLDS if w > 1}}
        print(json.dumps(fits), flush=True)
        none, one, three = (min(killed(text, n) for _ in range(rounds)) for n in (0, 1, 3))
        predicted = none + 3 * (one - none)
        print(
            json.dumps({"seconds": none, "with a kill": one, "three": three, "error": round(predicted / three - 1, 3)})
        )


if __name__ == "__main__":
    main()
