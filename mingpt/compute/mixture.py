"""The batch plan of several data sets, mixed by weights that may change by step.

A phase is a range of batches with the same weights. Its positions are cut into blocks of BLOCK, each with the same
number of samples of each component, in a seeded order of its own. A position takes the next sample of its component;
how many came before follows from the number of whole blocks, and from one block that is evaluated. A component's own
samples come in epochs, in an order that depends on no weight and no other component.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from mingpt.compute.batches import BatchPlan, derive, permute
from mingpt.config.datasets import MIX_BLOCK as BLOCK

Numbers = tuple[int, ...]  # of samples, by component

Ints = NDArray[np.int64]


def shares(weights: Sequence[float]) -> Numbers:
    """Count the samples of each component in a block, in proportion to the weights: by largest remainder."""
    # Exact, since equal remainders must be found equal: floats would decide by their rounding who gets a sample.
    whole = sum(map(Fraction, weights))
    quotas = [BLOCK * Fraction(weight) / whole for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (counts[i] - quotas[i], i))
    for i in by_remainder[: BLOCK - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


@lru_cache(maxsize=64)
def block(counts: Numbers, seed: int) -> tuple[Ints, Ints]:
    """(component, number of earlier positions of that component in the block) of each position of a block."""
    which = np.searchsorted(np.cumsum(counts), permute(np.arange(BLOCK), BLOCK, seed), side="right")
    earlier = np.empty_like(which)
    for component, count in enumerate(counts):
        earlier[which == component] = np.arange(count)
    return which, earlier


@dataclass(frozen=True)
class Mixture:
    """Components and their shares. A sample's number is that in its component, plus the sizes of those before it."""

    # Each component's name and number of samples.
    sizes: tuple[tuple[str, int], ...]
    # Each phase's first batch, and the samples of each component in a block.
    phases: tuple[tuple[int, Numbers], ...]


@dataclass(frozen=True)
class MixedPlan(BatchPlan):
    """Its phases begin at batches, not at steps: after a rollback that leaves out n batches, n steps earlier.

    So what a batch shows does not depend on which batches were dropped.
    """

    mixture: Mixture = field(kw_only=True)

    def samples_at(self, position: Ints) -> Ints:
        ids = np.empty_like(position)
        first = 0  # the number of the component's first sample
        which, index = self.draws(position)
        for component, (name, size) in enumerate(self.mixture.sizes):
            chosen = which == component
            # By name: a component that is added or left out changes no other one's order.
            own = BatchPlan(size, derive("component", self.seed, name), 1, 1)
            ids[chosen] = first + own.samples_at(index[chosen])
            first += size
        return ids

    def draws(self, position: Ints) -> tuple[Ints, Ints]:
        """(component, number of earlier positions of that component) of each position."""
        which = np.empty_like(position)
        index = np.empty_like(position)
        starts = np.array([self.position(first) for first, _ in self.mixture.phases])
        phase = np.searchsorted(starts, position, side="right") - 1
        number, offset = np.divmod(position - starts[phase], BLOCK)
        # A step touches few blocks, most often one, and each is evaluated once.
        for p, n in np.unique(np.stack([phase, number]), axis=1).T.tolist():
            here = (phase == p) & (number == n)
            component, earlier = self._block(p, n)
            before = np.array(self._before[p]) + n * np.array(self.mixture.phases[p][1])
            which[here] = component[offset[here]]
            index[here] = (before[component] + earlier)[offset[here]]
        return which, index

    def shown(self, batches: int) -> Numbers:
        """Count the samples of each component that the first batches take."""
        p = sum(first <= batches for first, _ in self.mixture.phases) - 1
        return self._added(p, self._before[p], batches)

    @cached_property
    def _before(self) -> list[Numbers]:
        """The numbers of samples of each component before each phase."""
        before = [(0,) * len(self.mixture.sizes)]
        for p, (first, _) in enumerate(self.mixture.phases[1:]):
            before.append(self._added(p, before[p], first))
        return before

    def _added(self, p: int, before: Numbers, until: int) -> Numbers:
        """`before`, and how many come from the start of phase p up to the batch `until`."""
        first, counts = self.mixture.phases[p]
        whole, rest = divmod(self.position(until) - self.position(first), BLOCK)
        # Whole blocks have their counts, and of the last one that is begun its first positions are looked at.
        inside = np.bincount(self._block(p, whole)[0][:rest], minlength=len(counts))
        return tuple((np.array(before) + whole * np.array(counts) + inside).tolist())

    def _block(self, p: int, number: int) -> tuple[Ints, Ints]:
        first, counts = self.mixture.phases[p]
        return block(counts, derive("block", self.seed, first, number))
