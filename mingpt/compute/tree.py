"""The order of additions: a binary tree over the M microbatches, which depends on M alone.

Floating-point addition is not associative: a sum of "my microbatches, then all processes" has other bits for another
world size; a sum along the tree has not.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

Subtree = tuple[int, int]  # (a, b): the subtree over the microbatches a to b - 1
Value = TypeVar("Value", float, Tensor)

CUT_SEARCH_RADIUS = 16  # microbatches left and right of an equal cut where `cuts` looks for a better one


def middle(a: int, b: int) -> int:
    """Where the tree splits the subtree [a, b) into two children."""
    # Another rule is another tree: other bits for every run, and NUMERICS must be raised.
    return (a + b) // 2


def whole_subtrees(lo: int, hi: int, a: int, b: int) -> list[Subtree]:
    """The largest subtrees of [a, b) that lie in [lo, hi), from left to right."""
    if lo <= a and b <= hi:
        return [(a, b)]
    if b <= lo or hi <= a:
        return []
    return whole_subtrees(lo, hi, a, middle(a, b)) + whole_subtrees(lo, hi, middle(a, b), b)


@cache
def shares(nodes: int, each: int, count: int) -> tuple[range, ...]:
    """The contiguous microbatches of each process, by rank, with `each` processes on every node.

    No process has more than the largest of equal shares, so a step takes no longer. Which sums are sent depends on the
    cuts: those between nodes have the fewest whole subtrees on both sides, then those between a node's processes. With
    3 nodes of 8, 64 microbatches: 1.67 sums a node in place of 3.67.
    """
    most = -(-count // (nodes * each))
    out = list[range]()
    for node_start, node_end in pairwise(cuts(0, count, nodes, range(each, each * most + 1), count)):
        for start, end in pairwise(cuts(node_start, node_end, each, range(1, most + 1), count)):
            out.append(range(start, end))
    return tuple(out)


def cuts(lo: int, hi: int, parts: int, sizes: range, count: int) -> list[int]:
    """Choose cuts of [lo, hi) into parts of these sizes that cross as few borders of subtrees as possible.

    If several do, the parts are as equal as possible. Returns lo, the cuts, hi. By dynamic programming; which process
    has which microbatches changes bytes, and no bits.
    """
    # By where the parts so far end, the best way to get there: (subtrees, squares of sizes, the last cut).
    ways: dict[int, tuple[int, int, int]] = {lo: (0, 0, lo)}
    last_cuts = []
    for part in range(1, parts + 1):
        equal = lo + (hi - lo) * part // parts
        longer = dict[int, tuple[int, int, int]]()
        # Only near an equal cut: the work grows with the square of the places.
        for end in range(equal - CUT_SEARCH_RADIUS, min(equal + CUT_SEARCH_RADIUS, hi) + 1):
            candidates = list[tuple[int, int, int]]()
            for start, (subtrees, squares, _) in ways.items():
                if end - start in sizes:
                    more = len(whole_subtrees(start, end, 0, count))
                    candidates.append((subtrees + more, squares + (end - start) ** 2, start))
            if candidates:
                longer[end] = min(candidates)
        ways = longer
        last_cuts.append(ways)
    backwards = [hi]
    for ways in reversed(last_cuts):
        backwards.append(ways[backwards[-1]][2])
    return backwards[::-1]


def tree_sum(a: int, b: int, sums: Mapping[Subtree, Value]) -> Value:
    """The sum of the subtree [a, b), in the order of the tree. sums: those of subtrees that together cover it."""
    if (a, b) in sums:
        return sums[a, b]
    return tree_sum(a, middle(a, b), sums) + tree_sum(middle(a, b), b, sums)


def tree_sum_of(values: Sequence[Value]) -> Value:
    """The sum along the tree of M values, one per microbatch."""
    return tree_sum(0, len(values), {(i, i + 1): v for i, v in enumerate(values)})


@cache
def parents(count: int) -> dict[tuple[Subtree, Subtree], Subtree]:
    """The parent of each pair of siblings in the tree over `count` microbatches."""
    out: dict[tuple[Subtree, Subtree], Subtree] = {}
    pending = [(0, count)]
    while pending:
        a, b = pending.pop()
        if b - a > 1:
            left, right = (a, middle(a, b)), (middle(a, b), b)
            out[left, right] = (a, b)
            pending += [left, right]
    return out


def add_siblings(sums: Mapping[Subtree, Tensor], parents: Mapping[tuple[Subtree, Subtree], Subtree]) -> list[Tensor]:
    """Add siblings until none are left. sums: of subtrees, from left to right, of one shape.

    Returns the sums of the largest subtrees that they cover. The additions are tree_sum's; all those of one level
    are one operation, so that a device's host has as much to do for 512 processes as for 2.
    """
    while pairs := [pair for pair in pairwise(sums) if pair in parents]:
        # Not in place: a sum must not keep the memory of all that it was added from.
        totals = torch._foreach_add([sums[left] for left, _ in pairs], [sums[right] for _, right in pairs])
        added = dict[Subtree, tuple[Subtree, Tensor]]()  # by the left sibling
        for (left, right), total in zip(pairs, totals, strict=True):
            added[left] = parents[left, right], total
        gone = {right for _, right in pairs}
        level = dict[Subtree, Tensor]()
        # By key: a variable that names a sum would keep all that has arrived with it until the next level is added.
        for subtree in sums:
            if subtree in added:
                parent, total = added[subtree]
                level[parent] = total
            elif subtree not in gone:
                level[subtree] = sums[subtree]
        sums = level
    return list(sums.values())


def sum_on_device(values: Tensor) -> Tensor:
    """The sum along the tree of M values in one tensor, with the bits of `tree_sum_of`. Waits for no device."""
    [total] = add_siblings({(m, m + 1): value for m, value in enumerate(values.unbind())}, parents(len(values)))
    return total
