"""`python benchmarks/throughput.py [--nanogpt DIR]`: training speed as ratios measured in one run, printed as JSON.

Compared: 6 layers x width 192 x block 128, microbatches of 12, one thread a process:
  one, two          this project's trainer with 1 and 2 processes, reduce=exact
  fast              with 2 processes, reduce=fast
  bare              a bare eager PyTorch loop over this project's model, one process
  nanogpt           nanoGPT's own model and optimizer (DIR: a checkout of karpathy/nanoGPT), one process
  nanogpt-tanh      the same with GPT-2's GELU, which is ours and takes longer on a CPU than nanoGPT's
  sgemm             the product of two 1024 x 1024 matrices again and again, one process: its FLOP a second

All of them run in each of `--rounds` rounds, so that a machine whose speed drifts slows all of them alike. A ratio is
the median over the rounds of the ratios within a round. Speeds are tokens a second after the first 3 steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mingpt.observe.speed import flops_per_token

BLOCK, MICRO, STEPS, WARM = 128, 12, 13, 3
SHAPE = {"n_layer": 6, "n_head": 6, "n_embd": 192, "block_size": BLOCK}
MICROBATCHES = 4
FLOPS = flops_per_token(2_706_624, SHAPE["n_layer"], SHAPE["n_embd"], BLOCK)  # of a token, forward and backward


def trainer(processes: int, reduce: str, text: Path) -> float:
    """Tokens a second of `mingpt.train`, from its own metrics."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(torchrun if processes > 1 else ()),
            *("-m", "mingpt.train", "model=gpt-mini", f"data.path={text}", f"run.dir={folder}", f"reduce={reduce}"),
            *(f"batch.micro_size={MICRO}", f"batch.global_size={MICRO * MICROBATCHES}", f"train.max_steps={STEPS}"),
            *("train.log_every=1", "train.eval_every=0", "data.val_fraction=0", "snapshot.every_seconds=0"),
        ]  # fmt: skip
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        rows = [json.loads(line) for line in Path(folder, "metrics", "attempt-00001.jsonl").read_text().splitlines()]
        times = [row["step_seconds"] for row in rows if "step_seconds" in row]
        seconds = sum(times[WARM:])
        return (STEPS - WARM) * MICRO * MICROBATCHES * BLOCK / seconds


def loop(step: Callable[[], None]) -> float:
    """Tokens a second of `step`: MICROBATCHES microbatches and an optimizer update."""
    for _ in range(WARM):
        step()
    began = time.perf_counter()
    for _ in range(STEPS - WARM):
        step()
    return (STEPS - WARM) * MICRO * MICROBATCHES * BLOCK / (time.perf_counter() - began)


def bare(text: Path) -> float:
    """PyTorch alone with this project's model: no DDP, exact sums, metrics or snapshots."""
    import torch

    from mingpt.model.gpt2 import GPT, GPTConfig

    torch.set_num_threads(1)
    data, vocabulary = _tokens(text)
    model = GPT(GPTConfig(vocab_size=vocabulary, **SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(MICROBATCHES):
            inputs, targets = _batch(data)
            loss, count = model(inputs, targets)
            (loss / (count * MICROBATCHES)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return loop(step)


def nanogpt(text: Path, checkout: Path, tanh: bool = False) -> float:
    """nanoGPT's model and its configure_optimizers, in the loop of its train.py (CPU, no compile)."""
    sys.path.insert(0, str(checkout))
    import torch
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    data, vocabulary = _tokens(text)
    model = GPT(GPTConfig(vocab_size=vocabulary, dropout=0.0, bias=True, **SHAPE))
    for block in model.transformer.h if tanh else ():
        block.mlp.gelu = torch.nn.GELU("tanh")
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")

    def step() -> None:
        for _ in range(MICROBATCHES):
            inputs, targets = _batch(data)
            _, loss = model(inputs, targets)
            (loss / MICROBATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return loop(step)


def sgemm() -> float:
    """FLOP a second of this machine's own matrix product."""
    import torch

    torch.set_num_threads(1)
    a, b, seconds = torch.randn(1024, 1024), torch.randn(1024, 1024), list[float]()
    for _ in range(50):
        began = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - began)
    return 2 * 1024**3 / statistics.median(seconds)


def _tokens(text: Path) -> tuple[Any, int]:
    import torch

    content = text.read_text()
    characters = sorted(set(content))
    ids = {c: i for i, c in enumerate(characters)}
    return torch.tensor([ids[c] for c in content]), len(characters)


def _batch(data: Any) -> tuple[Any, Any]:
    import torch

    starts = torch.randint(len(data) - BLOCK - 1, (MICRO,))
    rows = data[starts[:, None] + torch.arange(BLOCK + 1)]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path("data/shakespeare.txt"))
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT to measure beside ours")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)  # measure one, in this process, so that no allocator is shared
    options = parser.parse_args()
    if options.one:
        theirs = partial(nanogpt, options.text, options.nanogpt)
        alone: dict[str, Callable[[], float]] = {
            "bare": partial(bare, options.text),
            "sgemm": sgemm,
            "nanogpt": theirs,
            "nanogpt-tanh": partial(theirs, tanh=True),
        }
        print(alone[options.one]())
        return
    names = ["bare", "sgemm", *(["nanogpt", "nanogpt-tanh"] if options.nanogpt else [])]
    speeds: dict[str, list[float]] = {name: [] for name in ("one", "two", "fast", *names)}
    os.environ["OMP_NUM_THREADS"] = "1"
    for _ in range(options.rounds):
        speeds["one"].append(trainer(1, "exact", options.text))
        for name in names:
            again = [sys.executable, *sys.argv, "--one", name]
            output = subprocess.run(again, check=True, capture_output=True, text=True).stdout
            speeds[name].append(float(output.split()[-1]))  # nanoGPT prints lines of its own before
        speeds["two"].append(trainer(2, "exact", options.text))
        speeds["fast"].append(trainer(2, "fast", options.text))

    def ratio(a: str, b: str, times: float = 1) -> float:
        return round(times * statistics.median(x / y for x, y in zip(speeds[a], speeds[b], strict=True)), 3)

    print(
        json.dumps(
            {
                "tokens_per_second": {name: round(statistics.median(s)) for name, s in speeds.items()},
                "exact / fast, 2 processes": ratio("two", "fast"),
                "2 processes / 1 process": ratio("two", "one"),
                "1 process / bare loop": ratio("one", "bare"),
                "1 process / sgemm": ratio("one", "sgemm", FLOPS),
                **{f"1 process / {name}": ratio("one", name) for name in names if name.startswith("nano")},
                "rounds": options.rounds,
                "all": {name: [round(x) for x in s] for name, s in speeds.items()},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
