"""The law of the batch plan, as properties. For any data, batch, world and resume point: the same
samples in the same order, nothing lost, nothing twice."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mingpt.compute.batches import BatchPlan, RankSampler, permute
from mingpt.compute.tree import shares

seeds = st.integers(0, 2**63 - 1)
plans = st.builds(
    lambda samples, seed, micro, m, gaps: BatchPlan(
        samples, seed, 8 * micro * m, 8 * micro, tuple(np.cumsum(gaps).tolist())
    ),
    st.integers(1, 60),
    seeds,
    st.integers(1, 7),
    st.integers(1, 9),
    st.lists(st.integers(1, 20), max_size=3),
)
# Around powers of two the permutation's network changes its size, or holds n exactly.
sizes = st.integers(1, 3000) | st.sampled_from(sorted({2**k + d for k in range(13) for d in (-1, 0, 1)} - {0}))


def stream(plan: BatchPlan, steps: int) -> list[int]:
    return [i for step in range(steps) for i in plan.sample_ids(step).tolist()]


@given(sizes, seeds, st.data())
def test_permute_is_a_permutation_with_random_access(n: int, seed: int, data: st.DataObject) -> None:
    order = permute(np.arange(n), n, seed)
    assert sorted(order.tolist()) == list(range(n))
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), dtype=np.int64)
    assert permute(index, n, seed).tolist() == order[index].tolist()


def test_huge_ranges_need_no_memory() -> None:
    n = 10**12
    out = permute(np.concatenate([np.arange(5000), np.arange(n - 5000, n)]), n, 3)
    assert out[[0, 1, -1]].tolist() == [906231759903, 571228175321, 491128247919]  # pinned: see test_numerics.py
    assert len(set(out.tolist())) == 10_000


@given(plans)
def test_each_sample_comes_once_an_epoch_and_partial_batches_flow_into_the_next(plan: BatchPlan) -> None:
    epochs = 3
    ids = stream(plan, -(-epochs * plan.samples // (plan.global_size >> len(plan.double_at))))
    for epoch in range(epochs):
        assert sorted(ids[epoch * plan.samples : (epoch + 1) * plan.samples]) == list(range(plan.samples))


def test_a_batch_that_grows_takes_the_same_samples_in_larger_microbatches() -> None:
    plan = BatchPlan(50, 1, 16, 8, double_at=(2, 3))
    assert [plan.seen(step) for step in (1, 2, 3, 4)] == [4, 8, 16, 32]
    assert [replace(plan, dropped=((1, 3),)).seen(step) for step in (1, 2, 3)] == [4, 20, 36]
    assert stream(plan, 8) == stream(BatchPlan(50, 1, 4, 2), 24)
    assert [[len(ids) for ids in plan.by_microbatch(step)] for step in (0, 1, 2, 3, 10**9)] == [
        [2, 2], [2, 2], [4, 4], [8, 8], [8, 8],
    ]  # fmt: skip


@given(plans, st.integers(0, 50), st.integers(1, 4), st.data())
def test_any_world_from_any_step_computes_the_plan_in_its_order(
    plan: BatchPlan, start: int, steps: int, data: st.DataObject
) -> None:
    world = data.draw(st.integers(1, plan.microbatches), label="world size")
    mine = shares(1, world, plan.microbatches)
    samplers = [RankSampler(plan, m, start, start + steps) for m in mine]
    work = [list(s) for s in samplers]
    assert [len(w) for w in work] == [len(s) for s in samplers] == [steps * len(m) for m in mine]
    together = list[int]()
    for step in range(steps):
        for m, items in zip(mine, work, strict=True):
            together += [i for item in items[step * len(m) : (step + 1) * len(m)] for i in item]
    # An undisturbed world of one, that came here from step 0
    assert together == stream(plan, start + steps)[plan.position(start) :]
