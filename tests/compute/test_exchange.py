"""mingpt.compute.exchange: in two hops, the sums are those of the tree, and each card carries each of them once."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mingpt.compute.exchange import hops
from mingpt.compute.tree import shares, tree_sum, tree_sum_of, whole_subtrees
from mingpt.world.joining import _each
from mingpt.world.world import World
from tests.kits.snapshot_kit import ALONE


def world_of(nodes: int, each: int, rank: int) -> World:
    """Without process groups: nothing is sent."""
    node, place = divmod(rank, each)
    inside, across = replace(ALONE, rank=place, size=each), replace(ALONE, rank=node, size=nodes)
    return replace(ALONE, rank=rank, size=nodes * each, inside=inside, across=across)


@pytest.mark.parametrize(("nodes", "each"), [(2, 3), (3, 2), (5, 3)])
@pytest.mark.parametrize("microbatches", [16, 33])
def test_two_hops_add_up_along_the_tree(nodes: int, each: int, microbatches: int) -> None:
    values = torch.randn(microbatches, generator=torch.Generator().manual_seed(0)).exp2().unbind()
    ways = [hops(world_of(nodes, each, r), microbatches) for r in range(nodes * each)]
    of_nodes = []
    for rank, (first, second) in enumerate(ways):
        mine = shares(nodes, each, microbatches)[rank]
        assert first.sent[rank % each] == whole_subtrees(mine.start, mine.stop, 0, microbatches)
        if rank % each == 0:
            leaf = {
                (m, m + 1): values[m]
                for m in range(mine.start, shares(nodes, each, microbatches)[rank + each - 1].stop)
            }
            known = {node: tree_sum(*node, leaf) for nodes_of_one in first.sent for node in nodes_of_one}
            of_nodes.append({node: tree_sum(*node, known) for node in second.sent[rank // each]})
    for _, second in ways:
        assert second.sent == [list(sums) for sums in of_nodes]
    everything = {node: value for sums in of_nodes for node, value in sums.items()}
    assert tree_sum(0, microbatches, everything) == tree_sum_of(values)


@pytest.mark.parametrize(
    ("told", "each"),
    [
        ([[2, 0], [2, 1], [2, 0], [2, 1]], 2),
        ([[3, 0], [3, 1], [3, 2], [1, 0]], 1),  # not as many on each
        ([[2, 0], [2, 0], [2, 1], [2, 1]], 1),  # in another order
    ],
)
def test_nodes_are_what_the_launchers_say(told: list[list[int]], each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, (count, place) in enumerate(told):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count))
        world: Any = SimpleNamespace(size=4, rank=rank, local_rank=place, gather=lambda _: told)
        assert _each(world) == each
