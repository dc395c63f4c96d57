"""`python benchmarks/memory.py [key=value …] [--models 30M 124M]`: peak memory of a process in a short run, as JSON.

Each run takes 3 steps, with a snapshot after each, and is then continued for one step. Peaks are the resident memory
of the process that has most (VmHWM), which includes Python and torch; `idle` is a process of a tiny model. In `logits`
the output layer has most: `train.loss_rows=256 --models logits` shows what loss_rows spares.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FEW_TOKENS = ("data.path={text}", "model.block_size=32", "batch.micro_size=1", "batch.global_size=4")
SHAPES = {
    "idle": ("model.n_layer=1", "model.n_head=1", "model.n_embd=16", *FEW_TOKENS),
    "30M": ("model.n_layer=9", "model.n_head=8", "model.n_embd=512", *FEW_TOKENS),
    "124M": ("model.n_layer=17", "model.n_head=12", "model.n_embd=768", *FEW_TOKENS),
    "logits": (
        "model.n_layer=2", "model.n_head=2", "model.n_embd=128", "data=random", "model.block_size=128",
        "batch.micro_size=16", "batch.global_size=32",
    ),
}  # fmt: skip


def peak(command: list[str], own: str) -> float:
    """Run to the end; the largest VmHWM of its training processes, whose command lines name `own`, in MB."""
    peaks = dict[str, int]()
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            for status in Path("/proc").glob("[0-9]*/status"):
                try:
                    line = (status.parent / "cmdline").read_bytes()
                    if b"mingpt.train" not in line or own.encode() not in line or b"torch.distributed.run" in line:
                        continue
                    if found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text()):
                        peaks[status.parent.name] = int(found[1])
                except OSError:  # it has ended
                    continue
            time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}")
    return max(peaks.values()) / 1024


def measure(model: str, world: int, options: list[str], text: Path) -> dict[str, object]:
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, *(torchrun if world > 1 else ()), "-m", "mingpt.train", "model=gpt2",
            *(setting.format(text=text) for setting in SHAPES[model]), "train.eval_every=0", f"run.dir={folder}",
            "snapshot.hot_every_steps=0", "snapshot.every_steps=1", "schedule.decay_steps=9", *options,
        ]  # fmt: skip
        first, resumed = (round(peak([*command, f"train.max_steps={steps}"], folder)) for steps in (3, 4))
    return {"model": model, "processes": world, "options": options, "peak MB": first, "peak MB of the resume": resumed}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("options", nargs="*", help="settings, such as optimizer.shard=false")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        (text := Path(folder, "text.txt")).write_text("To be, or not to be: that is the question.\n" * 400)
        for model in options.models:
            for world in options.processes:
                print(json.dumps(measure(model, world, options.options, text)), flush=True)


if __name__ == "__main__":
    main()
