"""The order of additions: a binary tree over the M microbatches, which depends on M alone.

Floating-point addition is not associative: a sum of "my microbatches, then all processes" has other bits for another
world size; a sum along the tree has not.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

Subtree = tuple[int, int]  # (a, b): the subtree over the microbatches a to b - 1
Value = TypeVar("Value", float, Tensor)


def middle(a: int, b: int) -> int:
    """Where the tree splits the subtree [a, b) into two children."""
    return (a + b) // 2


def whole_subtrees(lo: int, hi: int, a: int, b: int) -> list[Subtree]:
    """The largest subtrees of [a, b) that lie in [lo, hi), from left to right."""
    if lo <= a and b <= hi:
        return [(a, b)]
    if b <= lo or hi <= a:
        return []
    return whole_subtrees(lo, hi, a, middle(a, b)) + whole_subtrees(lo, hi, middle(a, b), b)


def tree_sum(a: int, b: int, sums: Mapping[Subtree, Value]) -> Value:
    """The sum of the subtree [a, b), in the order of the tree. sums: those of subtrees that together cover it."""
    if (a, b) in sums:
        return sums[a, b]
    return tree_sum(a, middle(a, b), sums) + tree_sum(middle(a, b), b, sums)


def tree_sum_of(values: Sequence[Value]) -> Value:
    """The sum along the tree of M values, one per microbatch."""
    return tree_sum(0, len(values), {(i, i + 1): v for i, v in enumerate(values)})


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
    """Add siblings until none are left, in place. sums: of subtrees, from left to right, of one shape.

    Returns the sums of the largest subtrees that they cover. The additions are tree_sum's; all those of one level
    are one operation, so that a device's host has as much to do for 512 processes as for 2.
    """
    while pairs := [pair for pair in pairwise(sums) if pair in parents]:
        torch._foreach_add_([sums[left] for left, _ in pairs], [sums[right] for _, right in pairs])
        gone = {right for _, right in pairs}
        whole = {left: parents[left, right] for left, right in pairs}
        sums = {whole.get(subtree, subtree): total for subtree, total in sums.items() if subtree not in gone}
    return list(sums.values())
