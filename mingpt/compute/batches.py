"""The batch plan: the samples of a step as a pure function of (seed, step, dropped batches).

Which batches were dropped is in the optimizer's state (guard.py); the data pipeline keeps no state.

Each step takes the next positions of an endless sequence of epochs, each a permutation of the samples: global_size, or
fewer while the batch grows (batch.double_at). They are cut into M microbatches of one shape; each process computes a
contiguous share. A batch that grows has larger microbatches, not more: the tree of M additions stays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6  # of the Feistel network; 4 give a pseudorandom permutation (Luby and Rackoff 1988), 6 leave a margin


def derive(*parts: int | str) -> int:
    """A 63-bit seed from any values. Unlike hash(), it is equal on every machine and Python version."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def mix(x: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al. 2014) over x + key: a fast hash of 64 bits to 64 bits."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(key)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def permute(index: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """A seeded permutation of range(n), evaluated at each `index` (0 <= index < n), with random access and O(1) memory.

    A Feistel network permutes the smallest power of four that is at least n. A result of n or more goes through the
    network again until it is below n (cycle walking, Black and Rogaway 2002): a few passes, as the power is at most 4n.
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

    # Evaluated, not shuffled: with 10 billion samples a shuffled list would be 80 GB, and made anew in each attempt.
    out = network(index.astype(np.uint64))
    while (outside := out >= n).any():
        out[outside] = network(out[outside])
    return out.astype(np.int64)


def position(batch: int, global_size: int, double_at: Sequence[int]) -> int:
    """Count the positions of the sequence before this batch. See BatchPlan."""
    size = global_size >> len(double_at)
    count = batch * size
    # At each doubling, as many samples a batch are added as there were before it.
    for doublings, first in enumerate(double_at):
        count += max(0, batch - first) * (size << doublings)
    return count


@dataclass(frozen=True)
class BatchPlan:
    """The samples, microbatches and dropout seeds of each step; never depends on the world."""

    # Of the training set.
    samples: int
    seed: int
    # Samples in a step, a multiple of micro_size.
    global_size: int
    micro_size: int
    # Batches (steps, unless some were dropped) from which on there are twice as many samples.
    double_at: tuple[int, ...] = ()
    # Batches that no step shows any more, as sorted ranges (first, end) that do not touch.
    dropped: tuple[tuple[int, int], ...] = ()

    @property
    def microbatches(self) -> int:
        # The same while the batch grows: with more of them, each step would have a tree and shares of its own.
        return self.global_size // self.micro_size

    def batch(self, step: int) -> int:
        """The batch that is trained on at `step`: `step`, plus the batches that were dropped before it."""
        number = step
        for first, end in self.dropped:
            if number >= first:
                number += end - first
        return number

    def position(self, batch: int) -> int:
        return position(batch, self.global_size, self.double_at)

    def seen(self, steps: int) -> int:
        """Count the samples that these first steps take."""
        end = self.batch(steps)
        count = self.position(end)
        for first, stop in self.dropped:
            if stop <= end:
                count -= self.position(stop) - self.position(first)
        return count

    def sample_ids(self, step: int) -> NDArray[np.int64]:
        """The samples of `step` in order, shape (global_size,) or shorter, int64."""
        batch = self.batch(step)
        return self.samples_at(np.arange(self.position(batch), self.position(batch + 1), dtype=np.int64))

    def by_microbatch(self, step: int) -> list[list[int]]:
        """The samples of each microbatch of `step`."""
        return self.sample_ids(step).reshape(self.microbatches, -1).tolist()

    def samples_at(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at these positions of the sequence. (A mixture has another one: mixture.py.)"""
        epoch, offset = position // self.samples, position % self.samples
        ids = np.empty_like(offset)
        # One epoch; two if a step crosses an epoch's end; more if the data are tiny. No sample is left out at an end:
        # so the sequence knows nothing of the batch's size.
        for e in np.unique(epoch):
            chosen = epoch == e
            ids[chosen] = permute(offset[chosen], self.samples, derive("epoch", self.seed, int(e)))
        return ids

    def dropout_seed(self, step: int, microbatch: int) -> int:
        # Of the microbatch, never of a rank: in another world another process computes it.
        return derive("dropout", self.seed, step, microbatch)


@dataclass(frozen=True)
class RankSampler:
    """The batch sampler of one process: the sample ids of its microbatches, for the steps `start` to `stop` - 1.

    It is for torch's DataLoader; each item is one microbatch. It has no state: it can begin at any step, in any world.
    """

    plan: BatchPlan
    microbatches: range
    start: int
    stop: int

    def __iter__(self) -> Iterator[Sequence[int]]:
        for step in range(self.start, self.stop):
            samples = self.plan.by_microbatch(step)
            for m in self.microbatches:
                yield samples[m]

    def __len__(self) -> int:
        return (self.stop - self.start) * len(self.microbatches)
