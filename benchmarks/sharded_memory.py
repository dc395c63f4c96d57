"""`python benchmarks/sharded_memory.py`: what weights in slices would take, computed, not measured. Prints JSON.

small: the model of benchmarks/sharded_weights.py, to compare with what that measures, in MB. 7B, 13B: GPT-2's shape,
bf16, blocks computed again in backward, logits of 1024 positions at a time, in GB. whole: what `mingpt plan` says of
today's way. slices: the worst moment, a block's backward when most partial sums are there, by the trainer's own
buckets, and what it consists of. sent: of a process in a step; ratio: over what whole sends.
"""

import json
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch

from mingpt.commands.footprint import footprint, look_at, without_memory
from mingpt.compose.compose import configure
from mingpt.compute.buckets import BUCKET_BYTES, make_buckets
from mingpt.compute.exchange import pack, subtrees_by_rank
from mingpt.compute.numerics import autocast_for
from mingpt.compute.rules import trainable
from mingpt.compute.tree import whole_subtrees
from mingpt.model.language import LanguageModel
from mingpt.train.factory import build
from mingpt.world.world import World
from sharded_weights import BUCKET_BYTES as SMALL_BUCKETS
from sharded_weights import IN_FLIGHT, SETTINGS

LARGE = (
    "model=gpt2", "data=random", "model.block_size=2048", "batch.micro_size=1", "precision=bf16",
    "train.recompute=block", "train.loss_rows=1024", "snapshot.hot_every_steps=0",
)  # fmt: skip
SHAPES = {"7B": (32, 4096, 32), "13B": (40, 5120, 40)}  # layers, width, heads


def row(settings: Sequence[str], processes: int, unit: float, most: int = BUCKET_BYTES) -> dict[str, Any]:
    config = configure(settings)
    model, microbatches = look_at(config), config.global_size(processes) // config.batch.micro_size
    whole = footprint(config, model, processes, 8)
    autocast = autocast_for(config, torch.device("cpu"))
    with without_memory():
        built = build(config, model.vocabulary)
        assert isinstance(built, LanguageModel)
        world = World(0, processes, 0, torch.device("cpu"), "")
        buckets = make_buckets(trainable(built), set(), world, True, most)
        packings, blocks = pack(buckets, built.linear_matrices(), autocast), built.blocks()
        inside = {p for block in blocks for p in block.parameters()}
    outside = [bucket for bucket in buckets if any(slot.parameter not in inside for slot in bucket.slots)]
    lasting = sum(bucket.weights.nbytes for bucket in outside)
    local = sum(bucket.length * 4 for bucket in buckets)
    largest = max(bucket.weights.nbytes for bucket in buckets if bucket not in outside)
    done = range(processes, microbatches, processes)
    partials = max((len(whole_subtrees(0, m, 0, microbatches)) for m in done), default=1)
    slices = {
        "weights": local, "moments": 2 * local, "partial sums": partials * local, "outside of blocks": lasting,
        "a block": max(sum(p.nbytes for p in block.parameters()) for block in blocks),
        "gradients in flight": (2 if processes > 1 else 1) * (IN_FLIGHT + 1) * largest,
        "activations": model.peak(0),  # with the gradient of the output layer
    }  # fmt: skip
    messages = {b: packings[b].length if b in packings else b.length * 4 for b in buckets}
    once = sum(messages[bucket] for bucket in outside)
    again = (sum(messages.values()) - once) * (2 - 1 / len(blocks))  # of the last block not
    sent = (processes - 1) * (-(-microbatches // processes) * (again + local) + once)
    today = sum(messages.values()) + local * max(map(len, subtrees_by_rank(1, processes, microbatches)[0]))
    return {
        "parameters": model.parameters, "processes": processes, "microbatches": microbatches,
        "whole": round((sum(whole.steady.values()) + whole.step) / unit, 1),
        "slices": round(sum(slices.values()) / unit, 1),
        **{name: round(value / unit, 1) for name, value in slices.items()},
        "sums": partials, "sent": round(sent / unit), "ratio": round(sent / today / max(1, processes - 1), 1),
    }  # fmt: skip


def main() -> None:
    for processes in (1, 2, 4, 3):
        print(json.dumps({"model": "small"} | row(SETTINGS, processes, 1e6, SMALL_BUCKETS)), flush=True)
    for name, (processes, microbatches) in product(SHAPES, [(8, 8), (8, 64), (64, 64), (64, 512), (6, 64)]):
        layers, width, heads = SHAPES[name]
        shape = f"model.n_layer={layers}", f"model.n_embd={width}", f"model.n_head={heads}"
        settings = *LARGE, *shape, f"batch.global_size={microbatches}"
        print(json.dumps({"model": name} | row(settings, processes, 1e9)), flush=True)


if __name__ == "__main__":
    main()
