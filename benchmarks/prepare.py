"""`python benchmarks/prepare.py [--text FILE] [--tokenizer FOLDER]`: the cost of making and of reading shards, as JSON.

  prepare / plain loop   MB/s of mingpt.data.prepare in one process / MB/s of a loop that calls tokenizers for each
                         document: both read the file, encode, and write 16-bit tokens
  2 processes / 1        MB/s of prepare with two processes / with one, on `--copies` copies of the text, the start of
                         the processes included
  CPU, 2 processes / 1   the same ratio of CPU seconds of all processes, which a busy machine disturbs less
  reading / step         time to read a step's microbatches from shards / time of the step, for a model of GPT-2's width
                         and vocabulary at block 1024 with `--layers` of its 12 layers

All of them run in each of `--rounds` rounds; a ratio is the median over the rounds of the ratios within a round.
"""

import argparse
import json
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEPARATOR = "\n\n"
BLOCK, MICRO, MICROBATCHES = 1024, 1, 1


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def plain(text: Path, merges: str, out: Path) -> None:
    """The loop that one would write without this project."""
    import numpy as np

    from mingpt.data.bpe import GPT2Tokens

    vocabulary = GPT2Tokens(merges)
    encoder, end = vocabulary._tokenizer, vocabulary.end_of_text
    with open(out, "wb") as f:
        for document in text.read_text().split(SEPARATOR):
            if document:
                np.array([*encoder.encode(document, add_special_tokens=False).ids, end], dtype=np.uint16).tofile(f)


def prepared(texts: list[Path], merges: str, out: Path, processes: int) -> None:
    from mingpt.data.bpe import GPT2Tokens
    from mingpt.prepare.documents import Options
    from mingpt.prepare.prepare import prepare

    shutil.rmtree(out, ignore_errors=True)
    prepare([str(t) for t in texts], str(out), GPT2Tokens(merges), Options(SEPARATOR), processes=processes)


def reading(folder: Path, layers: int, rounds: int) -> dict[str, float]:
    """Milliseconds to read a step's microbatches, and to train on them."""
    import torch

    from mingpt.compute.batches import BatchPlan, RankSampler
    from mingpt.config.datasets import ShardsData
    from mingpt.data.opening import open_data
    from mingpt.model.gpt2 import GPT, GPTConfig

    torch.set_num_threads(1)
    source = open_data(ShardsData(path=str(folder), cache_dir=str(folder / "cache")), BLOCK, MICRO)
    plan = BatchPlan(len(source.train), 1, MICRO * MICROBATCHES, MICRO)
    model = GPT(GPTConfig(source.vocabulary.size, BLOCK, layers, 12, 768))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def read(step: int) -> list[Any]:
        return [source.train[ids] for ids in RankSampler(plan, range(MICROBATCHES), step, step + 1)]

    def step(microbatches: list[Any]) -> None:
        optimizer.zero_grad(set_to_none=True)
        for microbatch in microbatches:
            loss, count = model(*microbatch)
            (loss / count).backward()
        optimizer.step()

    step(read(0))
    reads = [seconds(lambda s=s: read(s)) for s in range(1, 101)]  # type: ignore[misc]
    steps = [seconds(lambda s=s: step(read(s))) for s in range(101, 101 + rounds)]  # type: ignore[misc]
    read_ms, step_ms = (1000 * statistics.median(times) for times in (reads, steps))
    return {"read_ms": read_ms, "step_ms": step_ms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path("data/shakespeare-complete.txt"))
    parser.add_argument("--tokenizer", default="data/gpt2", help="default: data/gpt2 (mingpt fetch gpt2-vocabulary)")
    parser.add_argument("--copies", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    from mingpt.data.bpe import GPT2Tokens, read_tokenizer

    vocabulary = read_tokenizer(options.tokenizer, "--tokenizer")
    assert isinstance(vocabulary, GPT2Tokens)
    merges, megabytes = vocabulary.merges, options.text.stat().st_size / 1e6
    rows: dict[str, list[float]] = {name: [] for name in ("plain", "ours", "one", "two", "cpu_one", "cpu_two")}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        copies = [Path(shutil.copy(options.text, folder / f"{i}.txt")) for i in range(options.copies)]
        for _ in range(options.rounds):
            rows["plain"].append(megabytes / seconds(lambda: plain(options.text, merges, folder / "plain.bin")))
            rows["ours"].append(megabytes / seconds(lambda: prepared([options.text], merges, folder / "set", 1)))
            for name, processes in (("one", 1), ("two", 2)):
                before = cpu_seconds()
                took = seconds(lambda n=processes: prepared(copies, merges, folder / "many", n))  # type: ignore[misc]
                rows[name].append(megabytes * options.copies / took)
                rows[f"cpu_{name}"].append(cpu_seconds() - before)
        times = reading(folder / "set", options.layers, max(3, options.rounds))

    def ratio(a: str, b: str) -> float:
        return round(statistics.median(x / y for x, y in zip(rows[a], rows[b], strict=True)), 3)

    print(
        json.dumps(
            {
                "megabytes_per_second": {name: round(statistics.median(rows[name]), 2) for name in list(rows)[:4]},
                "prepare / plain loop, 1 process": ratio("ours", "plain"),
                "2 processes / 1 process": ratio("two", "one"),
                "CPU, 2 processes / 1 process": ratio("cpu_two", "cpu_one"),
                "reading / step": round(times["read_ms"] / times["step_ms"], 6),
                **{name: round(value, 3) for name, value in times.items()},
                "layers": options.layers,
                "rounds": options.rounds,
                "all": {name: [round(x, 2) for x in r] for name, r in rows.items()},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
