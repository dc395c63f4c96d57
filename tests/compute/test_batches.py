"""The law of the batch plan, as properties. For any data, batch, world and resume point: the same
samples in the same order, nothing lost, nothing twice."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from mingpt.compute.batches import BatchPlan, RankSampler, derive, permute
from mingpt.data.windows import TokenFile, WindowDataset
from mingpt.world.world import share

seeds = st.integers(0, 2**63 - 1)
plans = st.builds(
    lambda samples, seed, micro, m: BatchPlan(samples, seed, micro * m, micro),
    st.integers(1, 60),
    seeds,
    st.integers(1, 7),
    st.integers(1, 9),
)


def whole(n: int, seed: int) -> NDArray[np.int64]:
    return permute(np.arange(n), n, seed)


def stream(plan: BatchPlan, steps: int) -> list[int]:
    return [i for step in range(steps) for i in plan.sample_ids(step).tolist()]


# --- derive: a seed from values ---


def test_derive_is_pinned() -> None:
    """A change of these breaks equality with every run that was ever started: raise the format's version with it."""
    assert derive() == 2847183694713211083
    assert derive("feistel", 1, 0) == 7399758817476057088
    assert derive("epoch", 7, 0) == 3369936718254563453
    assert derive("dropout", 1, 0, 0) == 2471198743109933928


@given(st.lists(st.one_of(st.integers(), st.text(max_size=5)), max_size=4))
def test_a_derived_seed_is_one_that_torch_and_numpy_take(parts: list[int | str]) -> None:
    seed = derive(*parts)
    assert 0 <= seed < 2**63
    torch.Generator().manual_seed(seed)


def test_derived_seeds_differ_where_any_part_does() -> None:
    five = [BatchPlan(100, seed, global_size=8, micro_size=2) for seed in range(5)]
    dropout = {plan.dropout_seed(step, m) for plan in five for step in range(50) for m in range(plan.microbatches)}
    assert len(dropout) == 5 * 50 * 4
    alike: list[tuple[int | str, ...]] = [("a", 1), ("a", "1"), ("a1",), (1, 23), (12, 3), ("a", "1", ""), ("a,1",)]
    assert len({derive(*parts) for parts in alike}) == len(alike)


# --- permute: a permutation with random access ---


@given(st.integers(1, 3000), seeds)
def test_permute_is_a_permutation(n: int, seed: int) -> None:
    assert sorted(whole(n, seed).tolist()) == list(range(n))


@pytest.mark.parametrize("n", sorted({2**k + d for k in range(13) for d in (-1, 0, 1)} - {0}))
def test_permute_is_a_permutation_around_powers_of_two_and_four(n: int) -> None:
    """Where the network's size jumps, and where it holds n exactly."""
    assert sorted(whole(n, 5).tolist()) == list(range(n))


@given(st.integers(1, 3000), seeds, st.data())
def test_random_access_equals_evaluating_the_whole(n: int, seed: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), dtype=np.int64)
    assert permute(index, n, seed).tolist() == whole(n, seed)[index].tolist()


@pytest.mark.parametrize("n", [10**12, 2**40, 2**40 + 1, 10**18])
def test_huge_ranges_need_no_memory(n: int) -> None:
    ends = np.concatenate([np.arange(5000), np.arange(n - 5000, n)])
    out = permute(ends, n, 3)
    assert out.min() >= 0
    assert out.max() < n
    assert len(set(out.tolist())) == 10_000
    # Neighbours land anywhere: of 10,000 fair draws about a tenth falls into each tenth of the range.
    tenths = np.bincount((out // (n // 10 + 1)).astype(np.int64), minlength=10)
    assert tenths.min() > 800
    assert tenths.max() < 1200


def test_permute_is_pinned() -> None:
    """As for derive: other values are another order of the samples in every run."""
    assert whole(1, 0).tolist() == [0]
    assert whole(10, 1).tolist() == [6, 8, 4, 3, 1, 7, 9, 0, 5, 2]
    assert whole(17, 42).tolist() == [7, 4, 2, 11, 13, 5, 12, 10, 9, 14, 0, 8, 3, 1, 6, 16, 15]
    of_huge = permute(np.array([0, 1, 10**12 - 1]), 10**12, 3)
    assert of_huge.tolist() == [906231759903, 571228175321, 491128247919]


def test_every_arrangement_of_four_comes_about_equally_often() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(2400):
        order = tuple(whole(4, seed).tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert min(counts.values()) > 50  # of 100 on average
    assert max(counts.values()) < 150


def test_a_permutation_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one element, not 0"):
        whole(0, 1)


# --- BatchPlan: samples of a step ---


@given(plans)
def test_each_sample_comes_once_an_epoch_and_partial_batches_flow_into_the_next(plan: BatchPlan) -> None:
    epochs = 3
    steps = -(-epochs * plan.samples // plan.global_size)
    ids = stream(plan, steps)
    assert len(ids) == steps * plan.global_size >= epochs * plan.samples
    for epoch in range(epochs):
        assert sorted(ids[epoch * plan.samples : (epoch + 1) * plan.samples]) == list(range(plan.samples))


def test_a_batch_larger_than_the_data_takes_several_epochs() -> None:
    plan = BatchPlan(samples=3, seed=1, global_size=8, micro_size=2)
    assert plan.sample_ids(0).tolist() == [2, 0, 1, 2, 1, 0, 0, 2]
    ids = stream(plan, 3)
    assert [sorted(ids[i : i + 3]) for i in range(0, 24, 3)] == [[0, 1, 2]] * 8


def test_the_plan_is_pinned() -> None:
    plan = BatchPlan(samples=10, seed=1, global_size=4, micro_size=2)
    assert plan.sample_ids(0).tolist() == [7, 0, 2, 4]
    assert plan.sample_ids(2).tolist() == [3, 9, 1, 7]  # two of the first epoch, two of the second
    assert plan.dropout_seed(0, 1) == derive("dropout", 1, 0, 1)


def test_another_epoch_and_another_seed_have_another_order() -> None:
    orders = [
        BatchPlan(1000, seed, global_size=1000, micro_size=10).sample_ids(epoch).tolist()
        for seed in (1, 2)
        for epoch in (0, 1, 2)
    ]
    for i, order in enumerate(orders):
        for other in orders[:i]:
            # Two fair orders agree at one position on average; hardly ever at ten.
            assert sum(a == b for a, b in zip(order, other, strict=True)) < 10


@given(plans, st.integers(0, 10**9))
def test_microbatches_in_order_make_up_the_step(plan: BatchPlan, step: int) -> None:
    parts = list(RankSampler(plan, range(plan.microbatches), step, step + 1))
    assert [len(p) for p in parts] == [plan.micro_size] * plan.microbatches
    assert np.concatenate(parts).tolist() == plan.sample_ids(step).tolist()


@given(st.integers(1, 60), seeds, st.integers(1, 20), st.integers(1, 4), st.integers(1, 4))
def test_the_batch_size_changes_no_sample_of_the_stream(n: int, seed: int, steps: int, a: int, b: int) -> None:
    """Positions count samples, so runs with other batches walk through the same sequence."""
    total = steps * a * b
    by_a, by_b = stream(BatchPlan(n, seed, a, 1), steps * b), stream(BatchPlan(n, seed, b, 1), steps * a)
    assert len(by_a) == total
    assert by_a == by_b


# --- RankSampler: what a process computes ---


@given(st.integers(0, 200), st.integers(1, 64))
def test_shares_are_contiguous_complete_and_even(count: int, size: int) -> None:
    shares = [share(rank, size, count) for rank in range(size)]
    assert [i for s in shares for i in s] == list(range(count))
    assert all(a.stop == b.start for a, b in pairwise(shares))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(plans, st.integers(0, 50), st.integers(1, 4), st.data())
def test_any_world_from_any_step_computes_the_plan_in_its_order(
    plan: BatchPlan, start: int, steps: int, data: st.DataObject
) -> None:
    world = data.draw(st.integers(1, plan.microbatches), label="world size")
    mine = [share(rank, world, plan.microbatches) for rank in range(world)]
    shares = [RankSampler(plan, m, start, start + steps) for m in mine]
    work = [list(s) for s in shares]
    assert [len(w) for w in work] == [len(s) for s in shares] == [steps * len(m) for m in mine]
    # An undisturbed world of one, that came here from step 0
    undisturbed = stream(plan, start + steps)[start * plan.global_size :]
    together: list[int] = []
    for step in range(steps):
        for m, items in zip(mine, work, strict=True):
            for item in items[step * len(m) : (step + 1) * len(m)]:
                assert len(item) == plan.micro_size
                together += item
    assert together == undisturbed


def test_a_share_can_be_iterated_again_and_keeps_no_position() -> None:
    items = RankSampler(BatchPlan(20, 1, 8, 2), mine=range(1, 3), start=3, stop=6)
    assert len(list(items)) == 6
    next(iter(items))
    assert list(items) == list(items)


# --- the loader ---


def loaded(windows: WindowDataset, items: RankSampler, workers: int) -> list[tuple[Tensor, Tensor]]:
    """Microbatches as the trainer's loader gives them."""
    loader = DataLoader(
        windows,
        batch_size=None,
        sampler=items,
        num_workers=workers,
        multiprocessing_context="spawn" if workers else None,
        generator=torch.Generator(),
    )
    return [(tokens, targets) for tokens, targets in loader]


def test_loader_workers_change_no_byte_and_no_order(tmp_path: Path) -> None:
    text = np.random.default_rng(1).integers(0, 65, 500).astype(np.uint8)
    np.save(tmp_path / "text.npy", text)
    windows = WindowDataset(TokenFile(tmp_path / "text.npy"), 40, 440, block_size=16, stride=3)
    plan = BatchPlan(len(windows), seed=1, global_size=12, micro_size=3)
    items = RankSampler(plan, mine=range(1, 4), start=5, stop=30)
    without, with_two = loaded(windows, items, workers=0), loaded(windows, items, workers=2)
    assert len(without) == len(with_two) == 25 * 3
    for ids, own, spawned in zip(items, without, with_two, strict=True):
        rows = np.stack([text[40 + 3 * i : 40 + 3 * i + 17] for i in ids]).astype(np.int64)
        for (tokens, targets), kind in ((own, "own"), (spawned, "spawned")):
            assert (tokens.dtype, targets.dtype) == (torch.int64, torch.int64)
            assert tokens.numpy().tobytes() == rows[:, :-1].tobytes(), kind
            assert targets.numpy().tobytes() == rows[:, 1:].tobytes(), kind
