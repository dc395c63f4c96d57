"""The batch plan: which samples make up step s, as a pure function of (seed, step). There is no state to save or lose.

A step takes the `global_size` sample positions `step * global_size ...` of an endless sequence that walks through epoch
after epoch, each in its own order; the last partial batch of an epoch flows into the next. The batch is cut into
microbatches of a fixed shape, and a process computes a contiguous share of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6  # of the Feistel network; 4 suffice to look random (Luby and Rackoff 1988), 6 leave a margin


def derive(*parts: int | str) -> int:
    """A 63-bit seed from any values: equal on every machine and Python version, unlike hash()."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def mix(x: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al. 2014) over x + key: a fast hash of 64 bits to 64 bits."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(key)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def permute(index: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """A seeded permutation of range(n), evaluated at `index` (each 0 <= i < n): random access, O(1) memory.

    A Feistel network over the smallest power of four that holds n; values that land outside walk on along their cycle
    until they are inside (Black and Rogaway 2002), which keeps it a permutation. At most 4 values for each inside one,
    so a few rounds of walking on average.
    """
    if n < 1:
        raise ValueError(f"a permutation needs at least one element, not {n}")
    half = max(1, ((n - 1).bit_length() + 1) // 2)  # bits of each half
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    keys = [derive("feistel", seed, r) for r in range(ROUNDS)]

    def network(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> shift, x & mask
        for key in keys:
            left, right = right, left ^ (mix(right, key) & mask)
        return (left << shift) | right

    out = network(index.astype(np.uint64))
    while (outside := out >= n).any():
        out[outside] = network(out[outside])
    return out.astype(np.int64)


@dataclass(frozen=True)
class BatchPlan:
    """What each step computes. Depends on the data's size, the seed and two batch sizes; never on a world.

    samples: number of samples in the training set. global_size: samples in a step; a multiple of micro_size.
    dropped: batches that no step shows any more, as sorted ranges (first, end) that do not touch.
    """

    samples: int
    seed: int
    global_size: int
    micro_size: int
    dropped: tuple[tuple[int, int], ...] = ()

    @property
    def microbatches(self) -> int:
        return self.global_size // self.micro_size

    def batch(self, step: int) -> int:
        """The number of the batch that `step` shows: its own, but for those that were dropped before it."""
        number = step
        for first, end in self.dropped:
            if number >= first:
                number += end - first
        return number

    def sample_ids(self, step: int) -> NDArray[np.int64]:
        """The samples of `step` in order, shape (global_size,)."""
        position = self.batch(step) * self.global_size + np.arange(self.global_size, dtype=np.int64)
        epoch, offset = position // self.samples, position % self.samples
        ids = np.empty_like(offset)
        for e in np.unique(epoch):  # one value, or two where a step crosses into the next epoch, or more for tiny data
            here = epoch == e
            ids[here] = permute(offset[here], self.samples, derive("epoch", self.seed, int(e)))
        return ids

    def microbatch_ids(self, step: int, microbatch: int) -> NDArray[np.int64]:
        """The samples of one microbatch of `step`, shape (micro_size,)."""
        return self.sample_ids(step)[microbatch * self.micro_size : (microbatch + 1) * self.micro_size]

    def dropout_seed(self, step: int, microbatch: int) -> int:
        return derive("dropout", self.seed, step, microbatch)


@dataclass(frozen=True)
class RankSampler:
    """One process's work from `start` on: for each step, its microbatches' sample ids, in order.

    The sampler that torch's DataLoader asks for; each item is one microbatch. Holding no position of its own, it can be
    iterated from any step by any number of processes and loader workers.
    """

    plan: BatchPlan
    mine: range
    start: int
    stop: int

    def __iter__(self) -> Iterator[Sequence[int]]:
        for step in range(self.start, self.stop):
            ids = self.plan.sample_ids(step)
            for m in self.mine:
                yield ids[m * self.plan.micro_size : (m + 1) * self.plan.micro_size].tolist()

    def __len__(self) -> int:
        return (self.stop - self.start) * len(self.mine)
