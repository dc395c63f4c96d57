"""`python benchmarks/losses.py [--nanogpt DIR]`: validation loss against CPU seconds, printed as JSON.

Models of the same size (4 layers, width 128, block 64) learn the characters of data/shakespeare.txt, each in one
process of one thread. A budget is in CPU seconds of steps, without start and evaluation: a program's CPU
seconds a step come from its runs of two lengths, taken in turns with the other programs'; its number of steps, and so
its learning rate's decay, is what the budget allows. Each loss is the exact mean over the last tenth of the text.

With `--nanogpt DIR` (a checkout of karpathy/nanoGPT), its own train.py runs its own recipe for a CPU on the same text,
with its learning rate and with tuned ones (`--nanogpt-lr`).
"""

import argparse
import json
import os
import pickle
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

GPT2, MODERN = ("model=gpt-micro",), ("model=modern",)
ADAMW = ("optimizer=adamw", "optimizer.lr=5e-3", "schedule=cosine", "schedule.warmup_steps=50")
MUON = ("optimizer=muon", "optimizer.lr=0.02", "schedule=linear", "schedule.warmup_steps=20")
OURS = {
    "gpt2 + adamw": (*GPT2, "model.n_layer=4", "model.n_head=4", "model.n_embd=128", *ADAMW),
    "gpt2 + muon": (*GPT2, "model.n_layer=4", "model.n_head=4", "model.n_embd=128", *MUON),
    "modern + adamw": (*MODERN, *ADAMW),
    "modern + muon": (*MODERN, *MUON),
}
QUIET = ("snapshot.every_steps=0", "snapshot.every_seconds=0", "snapshot.hot_every_steps=0", "track=[]",
         "train.eval_every=0", "train.log_every=1000", "batch.global_size=32", "batch.micro_size=8")  # fmt: skip
# config/train_shakespeare_char.py's settings for a CPU, from nanoGPT's README.
RECIPE = ("--device=cpu", "--compile=False", "--block_size=64", "--batch_size=12", "--n_layer=4", "--n_head=4",
          "--n_embd=128", "--dropout=0.0", "--eval_iters=1", "--log_interval=1000")  # fmt: skip


def ours(name: str, text: Path, steps: int, seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "mingpt.train", f"data.path={text}", f"run.dir={folder}/run", f"seed={seed}"]
        command += [*OURS[name], *QUIET, f"train.max_steps={steps}"]
        output = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True).stdout
    return float(re.findall(r"validation loss ([\d.]+)", output)[-1])


def nanogpt(checkout: Path, text: Path, steps: int, seed: int, lr: float) -> float:
    """nanoGPT's train.py with another seed and learning rate. Its loss is measured as ours is."""
    with tempfile.TemporaryDirectory() as out:
        settings = (f"--out_dir={out}", f"--max_iters={steps}", f"--lr_decay_iters={steps}", f"--eval_interval={steps}",
                    f"--learning_rate={lr}", f"--min_lr={lr / 10}", "--always_save_checkpoint=True")  # fmt: skip
        # Its seed is 1337 plus a number that a launcher gives.
        start = f"import sys; sys.argv[0] = 'train.py'; source = open('train.py').read().replace('1337', '{seed}')"
        recipe = ["config/train_shakespeare_char.py", "--dataset=mingpt_benchmark", *RECIPE, *settings]
        command = [sys.executable, "-c", f"{start}; exec(compile(source, 'train.py', 'exec'))", *recipe]
        subprocess.run(command, check=True, capture_output=True, cwd=checkout)
        again = [sys.executable, __file__, "--score", f"{out}/ckpt.pt", "--nanogpt", str(checkout), "--text", str(text)]
        return float(subprocess.run(again, check=True, capture_output=True, text=True).stdout.split()[-1])


def score(checkout: Path, checkpoint: str) -> float:
    """The mean loss over the validation split in consecutive blocks."""
    sys.path.insert(0, str(checkout))
    import torch
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    stored = torch.load(checkpoint, weights_only=True)
    model = GPT(GPTConfig(**stored["model_args"])).eval()
    model.load_state_dict(stored["model"])
    data = torch.from_numpy(np.fromfile(checkout / "data/mingpt_benchmark/val.bin", np.uint16).astype(np.int64))
    total, rows = 0.0, (len(data) - 1) // 64
    with torch.no_grad():
        for first in range(0, rows, 64):
            part = data[first * 64 : min(first + 64, rows) * 64 + 1]
            x, y = part[:-1].view(-1, 64), part[1:].view(-1, 64)
            total += model(x, y)[1].item() * len(x)
    return total / rows


def write_data(checkout: Path, text: Path) -> None:
    """The text as nanoGPT wants it, split where ours is."""
    content = text.read_text()
    characters = sorted(set(content))
    ids = np.array([characters.index(c) for c in content], np.uint16)
    border = round(len(ids) * 0.9)
    folder = checkout / "data/mingpt_benchmark"
    folder.mkdir(parents=True, exist_ok=True)
    ids[:border].tofile(folder / "train.bin")
    ids[border:].tofile(folder / "val.bin")
    meta = {"vocab_size": len(characters), "stoi": {}, "itos": {}}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


class Programs:
    """What is compared: a name, and for nanoGPT a learning rate."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.names = [*OURS]
        if options.nanogpt:
            self.names += [f"nanogpt {lr:g}" for lr in options.nanogpt_lr]

    def run(self, name: str, steps: int, seed: int) -> float:
        if name in OURS:
            return ours(name, self.options.text, steps, seed)
        return nanogpt(self.options.nanogpt, self.options.text, steps, seed, float(name.split()[1]))

    def cpu_seconds(self, name: str, steps: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.run(name, steps, 1)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def seconds_a_step(self) -> dict[str, float]:
        """The difference between runs of 10 and of 60 steps, the median of three, in turns."""
        found: dict[str, list[float]] = {name: [] for name in self.names}
        for _ in range(3):
            for name in self.names:
                found[name].append((self.cpu_seconds(name, 60) - self.cpu_seconds(name, 10)) / 50)
        return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path("data/shakespeare.txt"))
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to run beside ours")
    parser.add_argument("--nanogpt-lr", type=float, nargs="+", default=[1e-3, 4e-3])
    parser.add_argument("--budgets", type=float, nargs="+", default=[25, 50, 100], help="CPU seconds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", help="names of programs, to leave out the others")
    parser.add_argument("--score", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.text = options.text.resolve()
    if options.score:
        print(score(options.nanogpt, options.score))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.nanogpt:
        options.nanogpt = options.nanogpt.resolve()
        write_data(options.nanogpt, options.text)
    programs = Programs(options)
    programs.names = options.only or programs.names
    times = programs.seconds_a_step()
    table: dict[str, dict[str, object]] = {}
    for name in programs.names:
        row: dict[str, object] = {"cpu_ms_a_step": round(times[name] * 1e3, 1)}
        for budget in options.budgets:
            steps = round(budget / times[name])
            losses = [programs.run(name, steps, seed) for seed in options.seeds]
            spread = round(statistics.stdev(losses), 4) if len(losses) > 1 else None
            row[f"{budget:g} s"] = {"steps": steps, "mean": round(statistics.mean(losses), 4), "spread": spread}
            print(json.dumps({name: row}), file=sys.stderr, flush=True)
        table[name] = row
    print(json.dumps({"torch threads": 1, "seeds": options.seeds, "losses": table}, indent=1))


if __name__ == "__main__":
    main()
