"""`python docs/eventful_run.py FOLDER`: one run to which much happens, for the pictures in docs/.

A character GPT on Shakespeare lives through six attempts in worlds of 1, 2 and 3 processes: a request to stop, a kill,
a batch that is not finite, a process that hangs, spikes that make the run go back, another kill, one more spike. Then
the same run with one process that nothing else happens to; the two digests are compared.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from mingpt.compose import compose
from mingpt.compute.batches import BatchPlan
from mingpt.data.opening import open_data
from mingpt.data.source import Microbatch, Samples, Source
from mingpt.observe.ledger import ledger

GLOBAL, MICRO, SEED = 32, 8, 1
NOT_FINITE, SPIKES, ONE_MORE = (350,), (520, 521, 522), (700,)  # batches, counted from 0
SETTINGS = (
    "experiment=shakespeare_gpt2", "data._target_=eventful_run.text", f"batch.global_size={GLOBAL}", f"seed={SEED}",
    f"batch.micro_size={MICRO}", "train.max_steps=800", "train.eval_every=100", "train.log_every=10",
    "snapshot.every_steps=50", "snapshot.hot_every_steps=0", "health.spike_sigma=8", "health.spike_window=64",
    "health.max_skips=3", "health.max_rollbacks=1", "health.hang_seconds=30", "run.price_per_hour=1.5", "track=[]",
    "train.sample_every=200",
)  # fmt: skip


class Poisoned(Samples):
    """Text, of which some samples are nonsense, and some have a weight that is no number."""

    def __init__(self, samples: Samples, nonsense: set[int], not_finite: set[int]) -> None:
        self.samples, self.nonsense, self.not_finite = samples, nonsense, not_finite

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, ids: Sequence[int]) -> Microbatch:
        tokens, targets = self.samples[ids]
        weights = torch.ones(targets.shape)
        for row, sample in enumerate(map(int, ids)):
            if sample in self.nonsense:
                targets[row] = targets[row].flip(0) * 7 % 60
            if sample in self.not_finite:
                weights[row] = torch.nan
        return tokens, targets, weights


def text(path: str, block_size: int, micro_size: int) -> Source:
    config = compose.configure([f"data.path={path}"])
    assert config
    plain = open_data(config.data, block_size, micro_size)
    plan = BatchPlan(len(plain.train), SEED, GLOBAL, MICRO)

    def second_microbatch(batches: Sequence[int]) -> set[int]:
        return {int(i) for batch in batches for i in plan.sample_ids(batch)[MICRO : 2 * MICRO]}

    train = Poisoned(plain.train, second_microbatch(SPIKES + ONE_MORE), second_microbatch(NOT_FINITE))
    return Source(train, plain.validation, plain.vocabulary, plain.sha256)


def start(run_dir: Path, world: int, *more: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", "--standalone"]
    data = Path("data/shakespeare.txt").resolve()
    arguments = [*SETTINGS, f"data.path={data}", f"run.dir={run_dir}", *more]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": env}
    return subprocess.Popen([*command, "-m", "mingpt.train", *arguments], **options)


def follow(run: "subprocess.Popen[str]", step: int | None = None) -> str:
    """Print what the run says, up to this step's line or its end; returns it."""
    assert run.stdout
    said = ""
    for line in run.stdout:
        print(line, end="", flush=True)
        said += line
        if step and (match := re.match(r"step +(\d+)/", line)) and int(match[1]) >= step:
            break
    return said


def workers(run: "subprocess.Popen[str]") -> list[psutil.Process]:
    """By rank: torchrun's own children, without those that they start in turn."""
    ranks = {p.environ().get("RANK"): p for p in psutil.Process(run.pid).children()}
    return [ranks[rank] for rank in sorted(filter(None, ranks))]


def attempt(run_dir: Path, world: int, until: int | None, number: signal.Signals | None, whom: str, *more: str) -> str:
    run = start(run_dir, world, *more)
    said = follow(run, until)
    if number is not None:
        print(f"== {number.name} to {whom} of {world}", flush=True)
        if whom == "all":
            run.send_signal(number)
        else:
            workers(run)[-1].send_signal(number)
    return said + follow(run) + f"exit code {run.wait()}\n"


def main() -> None:
    folder, began = Path(sys.argv[1]).resolve(), time.time()
    said = attempt(folder / "eventful", 1, 150, signal.SIGTERM, "all")
    said += attempt(folder / "eventful", 2, 300, signal.SIGKILL, "one")
    said += attempt(folder / "eventful", 3, 450, signal.SIGSTOP, "one")
    said += attempt(folder / "eventful", 2, None, None, "")
    said += attempt(folder / "eventful", 1, 640, signal.SIGKILL, "one")
    said += attempt(folder / "eventful", 3, None, None, "")
    (folder / "eventful.log").write_text(said)
    wall, known = time.time() - began, ledger(f"{folder}/eventful")
    print(f"wall clock {wall:.1f} s, the ledger's {known.wall:.1f} s, its parts {sum(known.groups().values()):.1f} s")
    # On a busy machine one process may be silent for long; after the three spikes it ends, and goes on.
    unhurried = (folder / "alone", 1, None, None, "", "health.hang_seconds=300")
    alone = attempt(*unhurried) + attempt(*unhurried)
    digests = [re.findall(r"finished: step 800, digest ([0-9a-f]{64})", text) for text in (said, alone)]
    print(digests)
    sys.exit(len(digests[0]) != 1 or digests[0] != digests[1])


if __name__ == "__main__":
    main()
