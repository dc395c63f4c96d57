"""mingpt.compute.reduction: one order of additions, whoever adds. (With several processes: test_exactness.py.)"""

from collections.abc import Collection, Iterator
from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mingpt.compute.buckets import BUCKET_BYTES, make_buckets
from mingpt.compute.reduction import ExactReduction, FastReduction, Reduction
from mingpt.compute.rules import trainable
from mingpt.compute.tree import shares, tree_sum, tree_sum_of, whole_subtrees
from mingpt.config.schema import WorldConfig
from mingpt.world.joining import join
from mingpt.world.world import World


def leaves(count: int, seed: int) -> list[Tensor]:
    """Values of both signs and of magnitudes so different that any other order of additions gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(-12, 12, (count, 64), generator=generator).float().exp2()
    return list(torch.randn(count, 64, generator=generator) * scales)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_any_world_adds_up_to_the_same_bits(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    nodes = data.draw(st.integers(1, count))
    each = data.draw(st.integers(1, count // nodes))
    values = leaves(count, data.draw(st.integers(0, 2**32)))
    known = {}
    found = shares(nodes, each, count)
    assert [m for mine in found for m in mine] == [*range(count)]
    assert len(found) == nodes * each
    assert all(
        0 < len(mine) <= -(-count // (nodes * each)) for mine in found
    )  # a step takes no longer than with equal ones
    for mine in found:
        for a, b in whole_subtrees(mine.start, mine.stop, 0, count):
            known[a, b] = tree_sum(a, b, {(m, m + 1): values[m] for m in mine})  # sees no other share's values
    assert torch.equal(tree_sum(0, count, known), tree_sum_of(values))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join(WorldConfig(device="cpu")) as world:
        yield world


class Branches(nn.Module):
    """Some microbatches use its second layer, the others its third. The first one's memory is not in its own order."""

    def __init__(self, used: Collection[int]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.used, self.layers = used, nn.ModuleList([nn.Linear(40, 40) for _ in range(3)])
        self.layers[0].weight = nn.Parameter(torch.randn(40, 40).t())
        self.conv = nn.Conv2d(4, 6, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss(self, microbatch: int) -> Tensor:
        generator = torch.Generator().manual_seed(microbatch)
        x = torch.randn(5, 40, generator=generator) * 10.0 ** (microbatch % 5 - 2)
        x = self.layers[1 if microbatch in self.used else 2](torch.tanh(self.layers[0](x)))
        loss: Tensor = self.conv(x.view(5, 4, 2, 5)).square().sum()
        return loss


def alone(net: Branches, count: int) -> dict[str, tuple[Tensor, ...]]:
    """By parameter, the gradient of each microbatch by itself: zeros where it does not use it."""
    names, parameters = zip(*trainable(net), strict=True)
    losses = [net.loss(m) for m in range(count)]
    rows = [torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True) for loss in losses]
    return dict(zip(names, zip(*rows, strict=True), strict=True))


def wrong(reduction: Reduction, expected: dict[str, Tensor]) -> list[str]:
    """The parameters whose sum is another one."""
    sums = {slot.name: reduction.buckets[i].view(reduction.sums[i], slot) for i, slot in reduction.place.values()}
    return [name for name, wanted in expected.items() if not torch.equal(sums[name], wanted)]


@pytest.mark.parametrize(("fast", "by_bucket"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("count", "used", "bucket_bytes"),
    [
        (1, {0}, 1000),
        (4, {1, 3}, BUCKET_BYTES),
        (5, {0, 1, 3}, 1000),
        (7, {4}, 1000),
        (8, set(), 1000),
    ],
)
def test_gradients_are_added_along_the_tree_and_fast_ones_from_left_to_right(
    world: World, count: int, used: Collection[int], bucket_bytes: int, fast: bool, by_bucket: bool
) -> None:
    """by_bucket: added together, as on a GPU."""
    net = Branches(used)
    strides = [p.stride() for p in net.parameters()]
    expected = {n: reduce(add, column) if fast else tree_sum_of(column) for n, column in alone(net, count).items()}
    made = make_buckets(net.named_parameters(), set(), world, False, bucket_bytes)
    assert len(made) == (7 if bucket_bytes == 1000 else 1)
    reduction = FastReduction(made, world) if fast else ExactReduction(made, count, world)
    reduction.by_bucket = by_bucket
    for _ in range(2):
        reduction.begin()
        for m in range(count):
            reduction.expect(m, last=m == count - 1)
            if isinstance(reduction, ExactReduction):
                assert len(reduction.stack) <= count.bit_length()  # 1 + log2(count), rounded down
            net.loss(m).backward()
        reduction.finish()
        assert wrong(reduction, expected) == []
        assert all(p.grad is None for p in net.parameters())
    assert [p.stride() for p in net.parameters()] == strides


@pytest.mark.parametrize("by_bucket", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1000, BUCKET_BYTES])
def test_gradients_of_a_graph_take_the_same_way(world: World, bucket_bytes: int, by_bucket: bool) -> None:
    """Some microbatches are written to tensors of the buckets' layout, and taken from there; others come by hooks."""
    count, net = 7, Branches(range(7))
    net.layers[2].requires_grad_(False)  # which no microbatch uses
    expected = {name: tree_sum_of(column) for name, column in alone(net, count).items()}
    made = make_buckets(trainable(net), set(), world, False, bucket_bytes)
    reduction, written = ExactReduction(made, count, world), {bucket: bucket.empty() for bucket in made}
    reduction.by_bucket = by_bucket
    for replayed in (set[int](), {0, 1, 3, 6}, {2, 4, 5}, set(range(count))):
        reduction.begin()
        for m in range(count):
            if m in replayed:
                with reduction.writes_to(written):
                    net.loss(m).backward()
                reduction.accumulate(m, m == count - 1, written)
                for bucket, flat in written.items():  # the next replay would, too
                    for slot in bucket.slots:
                        bucket.view(flat, slot).fill_(torch.nan)
            else:
                reduction.expect(m, last=m == count - 1)
                net.loss(m).backward()
        reduction.finish()
        assert wrong(reduction, expected) == [], replayed
        for bucket, flat in zip(made, reduction.sums, strict=True):
            assert all(flat[gap].count_nonzero() == 0 for gap in bucket.gaps)  # norms are taken of whole chunks


def test_a_gradient_that_comes_in_parts_is_refused(world: World) -> None:
    """A reentrant checkpoint runs a backward of its own for each use of a parameter."""
    net = nn.Linear(40, 40)
    reduction = ExactReduction(make_buckets(net.named_parameters(), set(), world, False), 1, world)
    reduction.begin()
    reduction.expect(0, last=True)
    once = checkpoint(net, torch.ones(5, 40, requires_grad=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"the gradient of (weight|bias) came in parts: use checkpoint"):
        checkpoint(net, once, use_reentrant=True).sum().backward()
