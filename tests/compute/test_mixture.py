"""The order of a mixture, as properties: shares are exact in each block, and each component has epochs of its own."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mingpt.compute.mixture import BLOCK, MixedPlan, Mixture, shares


def plan_of(
    sizes: Sequence[int], phases: Sequence[tuple[int, Sequence[float]]], seed: int = 1, batch: int = 64
) -> MixedPlan:
    named = tuple((chr(ord("a") + i), size) for i, size in enumerate(sizes))
    mixture = Mixture(named, tuple((first, shares(weights)) for first, weights in phases))
    return MixedPlan(sum(sizes), seed, batch, 8, mixture=mixture)


@st.composite
def plans(draw: st.DrawFn) -> MixedPlan:
    sizes = draw(st.lists(st.integers(40, 900), min_size=1, max_size=4))
    gaps = draw(st.lists(st.integers(1, 120), max_size=3))
    weights = st.lists(st.floats(0.05, 9), min_size=len(sizes), max_size=len(sizes))
    phases = [(first, draw(weights)) for first in np.cumsum([0, *gaps]).tolist()]
    plan = plan_of(sizes, phases, draw(st.integers(0, 2**63 - 1)), 8 * draw(st.integers(1, 12)))
    return replace(plan, double_at=draw(st.sampled_from([(), (3,), (50, 90)])))


def test_shares_and_order_are_pinned() -> None:
    """Other numbers are other samples in every run with a mixture."""
    assert BLOCK == 4096
    assert (shares([7, 3]), shares([1, 1, 1]), shares([2, 0])) == ((2867, 1229), (1366, 1365, 1365), (BLOCK, 0))
    plan = plan_of([10, 5], [(0, [0.7, 0.3]), (1, [0.2, 0.8])], batch=16)
    assert plan.sample_ids(0).tolist() == [9, 11, 5, 10, 0, 4, 1, 2, 6, 8, 3, 7, 3, 7, 5, 12]
    assert plan.sample_ids(1).tolist() == [14, 13, 14, 12, 10, 11, 2, 13, 12, 14, 8, 6, 11, 13, 10, 12]
    assert plan.sample_ids(10**11)[:4].tolist() == [3, 10, 14, 12]  # far positions need no memory and no time


@settings(max_examples=6)
@given(plans())
def test_each_component_shows_each_of_its_samples_once_an_epoch_of_its_own(plan: MixedPlan) -> None:
    """Also where a phase ends inside a block, and where an epoch ends inside a step."""
    steps = 2 * BLOCK // plan.global_size
    ids = np.concatenate([plan.sample_ids(step) for step in range(steps)])
    shown, first = plan.shown(steps), 0
    for (_, size), count in zip(plan.mixture.sizes, shown, strict=True):
        own = ids[(ids >= first) & (ids < first + size)] - first
        assert len(own) == count
        whole = len(own) // size * size
        assert (np.sort(own[:whole].reshape(-1, size), axis=1) == np.arange(size)).all()
        assert len(set(own[whole:].tolist())) == len(own) - whole
        first += size


def test_dropped_batches_are_left_out_and_the_others_keep_their_samples() -> None:
    """Phases go with the batches: four that were dropped let the second phase begin four steps earlier."""
    plan = plan_of([500, 300], [(0, [0.7, 0.3]), (10, [0.1, 0.9])])
    without = replace(plan, dropped=((4, 7), (9, 10)))
    assert isinstance(without, MixedPlan)
    for step, batch in enumerate([*range(4), 7, 8, *range(10, 20)]):
        assert (without.sample_ids(step) == plan.sample_ids(batch)).all()
        assert without.dropout_seed(step, 0) == plan.dropout_seed(step, 0)
