"""`python benchmarks/bytes.py`: the bytes that the exact sum sends / those of a ring all-reduce; computed, not timed.

mean: over the processes. most: of the process that sends most. card: of nodes with several processes, what the busiest
network card sends; in one hop: if each process sent all that it holds to the others. weights: with precision=bf16, what
the all-gather of a model's weights sends at 8 processes / what it sends with precision=fp32.
"""

import json
import statistics

import torch

from mingpt.commands.footprint import without_memory
from mingpt.compose.compose import configure
from mingpt.compute.buckets import make_buckets
from mingpt.compute.exchange import pack, subtrees_by_rank
from mingpt.compute.rules import trainable
from mingpt.model.language import LanguageModel
from mingpt.train.factory import build
from mingpt.world.world import World


def bytes_a_step(parameters: int, microbatches: int, processes: list[int]) -> int:
    """How many bytes the busiest node sends to other nodes for one exact sum. processes: of each node."""
    if len(set(processes)) > 1:
        of_each, (sent, _) = processes, subtrees_by_rank(1, sum(processes), microbatches)
    else:  # nodes add up inside first
        of_each, (_, sent) = [1] * len(processes), subtrees_by_rank(len(processes), processes[0], microbatches)
    world, first, most, pieces = sum(of_each), 0, 0.0, [len(subtrees) for subtrees in sent]
    for count in of_each:
        most = max(most, sum(pieces[first : first + count]) * (world - count) / world)  # slices for other nodes
        first += count
    most += (world - 1) / world  # all-gather: each slice once, around a ring
    return int(most * 4 * parameters)


def of_weights(model: str) -> float:
    config, autocast = configure([f"model={model}"]), torch.autocast("cpu", torch.bfloat16)
    with without_memory():
        built = build(config, 50257)
        buckets = make_buckets(trainable(built), set(), World(0, 8, 0, torch.device("cpu"), ""), True)
        assert isinstance(built, LanguageModel)
        packings = pack(buckets, built.linear_matrices(), autocast)
    sent = [packings[b].length if b in packings else b.local.nbytes for b in buckets]
    return sum(sent) / sum(bucket.local.nbytes for bucket in buckets)


def main() -> None:
    rows = list[dict[str, float | str]]()
    for world, microbatches in [(2, 16), (4, 16), (16, 64), (3, 12), (3, 48), (6, 48), (5, 64), (7, 64), (12, 64)]:
        partial_sums = [len(subtrees) for subtrees in subtrees_by_rank(1, world, microbatches)[0]]
        # The all-to-all sends each partial sum, the all-gather one sum; a ring all-reduce sends the gradients twice. A
        # process sends all but its own slice of each: the factor (world - 1) / world, which cancels.
        mean, most = (statistics.mean(partial_sums) + 1) / 2, (max(partial_sums) + 1) / 2
        rows.append({"processes": world, "M": microbatches, "mean": round(mean, 2), "most": round(most, 2)})
    many = [(125, 8, 2000), (125, 8, 2048)]
    for nodes, each, microbatches in [
        (2, 2, 16),
        (2, 8, 64),
        (4, 4, 64),
        (8, 8, 64),
        (3, 4, 48),
        (3, 8, 64),
        (7, 8, 64),
        *many,
    ]:
        world = nodes * each
        ring = 2 * (world - 1) / world * 4
        sums = [len(subtrees) for subtrees in subtrees_by_rank(1, world, microbatches)[0]]
        first_hop = [sum(sums[n * each : (n + 1) * each]) * (world - each) / world for n in range(nodes)]
        one_hop = 4 * (max(first_hop) + (world - 1) / world)
        card = bytes_a_step(1_000_000, microbatches, [each] * nodes) / 1_000_000
        rows.append({"nodes": nodes, "processes of each": each, "M": microbatches, "card": round(card / ring, 2)})
        rows[-1]["card, in one hop"] = round(one_hop / ring, 2)
    rows += [{"model": model, "weights": round(of_weights(model), 2)} for model in ("gpt2", "gpt2-xl", "modern-1b")]
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
