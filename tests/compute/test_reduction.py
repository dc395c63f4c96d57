"""mingpt.compute.reduction: one order of additions, whoever adds. (With several processes: test_exactness.py.)"""

from collections.abc import Callable, Collection, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mingpt.compute.buckets import BUCKET_BYTES, make_buckets
from mingpt.compute.fast import FastReduction
from mingpt.compute.reduction import ExactReduction, Reduction
from mingpt.compute.tree import middle, parents, tree_sum, tree_sum_of, whole_nodes
from mingpt.config.schema import WorldConfig
from mingpt.train.stats import StatsExchange
from mingpt.world.joining import join
from mingpt.world.world import World, share

COUNTS = range(1, 41)


def leaves(count: int, seed: int, size: int = 64) -> list[Tensor]:
    """Values of both signs and of magnitudes so different that any other order of additions gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(-12, 12, (count, size), generator=generator).float().exp2()
    return list(torch.randn(count, size, generator=generator) * scales)


def left_fold(values: list[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def test_the_tree_of_five_is_the_one_that_is_promised() -> None:
    """Pinned: another tree would end the equality with every snapshot that exists."""
    assert middle(0, 5) == 2
    assert parents(5) == {
        ((0, 2), (2, 5)): (0, 5),
        ((0, 1), (1, 2)): (0, 2),
        ((2, 3), (3, 5)): (2, 5),
        ((3, 4), (4, 5)): (3, 5),
    }
    a, b, c, d, e = leaves(5, 0)
    assert torch.equal(tree_sum_of([a, b, c, d, e]), (a + b) + (c + (d + e)))
    assert parents(1) == {}
    assert tree_sum_of([1.5]) == 1.5


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_any_world_adds_up_to_the_same_bits(data: st.DataObject) -> None:
    count = data.draw(st.sampled_from(COUNTS))
    world = data.draw(st.integers(1, count))
    values = leaves(count, data.draw(st.integers(0, 2**32)))
    known = {}
    for rank in range(world):
        mine = share(rank, world, count)
        for a, b in whole_nodes(mine.start, mine.stop, 0, count):
            known[a, b] = tree_sum(a, b, {(m, m + 1): values[m] for m in mine})  # sees no other share's values
    assert torch.equal(tree_sum(0, count, known), tree_sum_of(values))


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join(WorldConfig(device="cpu")) as world:
        yield world


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def inputs(microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randn(5, 40, generator=generator) * 10.0 ** (microbatch % 5 - 2)


def loss_of(net: nn.Module, microbatch: int) -> Tensor:
    return net(inputs(microbatch)).square().sum()


def gradients(count: int) -> list[list[Tensor]]:
    """Each microbatch's, computed alone."""
    net = model()
    return [list(torch.autograd.grad(loss_of(net, m), list(net.parameters()))) for m in range(count)]


def reduction_of(
    net: nn.Module, count: int, world: World, bucket_bytes: int = BUCKET_BYTES, fast: bool = False
) -> Reduction:
    buckets = make_buckets(net.named_parameters(), set(), world, False, bucket_bytes)
    return FastReduction(buckets, world) if fast else ExactReduction(buckets, count, world)


def backward(reduction: Reduction, count: int, loss: Callable[[int], Tensor]) -> None:
    """A step's gradients, as the trainer computes them."""
    reduction.begin()
    for m in range(count):
        if m == count - 1:
            reduction.arm(m)
        loss(m).backward()
        if m < count - 1:
            reduction.push(m)
    reduction.finish()


def summed(reduction: Reduction, net: nn.Module) -> list[Tensor]:
    """By parameter, in the model's order."""
    found = {p: reduction.buckets[i].view(reduction.sums[i], slot) for p, (i, slot) in reduction.place.items()}
    return [found[p] for p in net.parameters()]


@pytest.mark.parametrize(("count", "bucket_bytes"), [(1, 1000), (2, 1000), (4, BUCKET_BYTES), (7, 1000), (8, 1000)])
def test_exact_reduction_gives_the_tree_sum_of_the_gradients(world: World, count: int, bucket_bytes: int) -> None:
    net = model()
    reduction = reduction_of(net, count, world, bucket_bytes)
    assert isinstance(reduction, ExactReduction)
    expected = [tree_sum_of(column) for column in zip(*gradients(count), strict=True)]
    deepest = list[int]()

    def loss(m: int) -> Tensor:
        deepest.append(len(reduction.stack))
        return loss_of(net, m)

    for step in range(3):
        backward(reduction, count, loss)
        assert all(torch.equal(g, e) for g, e in zip(summed(reduction, net), expected, strict=True)), f"step {step}"
        assert [p.grad for p in net.parameters()] == [None] * 6
    assert max(deepest) <= count.bit_length()  # 1 + log2(count), rounded down
    assert len(reduction.buckets) == (4 if bucket_bytes == 1000 else 1)
    # A plain accumulation is another sum (of three on), so the equality above is no accident.
    folded = [left_fold(list(column)) for column in zip(*gradients(count), strict=True)]
    assert any(not torch.equal(f, e) for f, e in zip(folded, expected, strict=True)) == (count > 2)


class Laid(nn.Module):
    """A convolution and a matrix whose memory lies in another order than their elements, and a plain layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, padding=1)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.turned = nn.Parameter(torch.randn(8, 60).t())
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.conv(x.view(-1, 4, 2, 5)).flatten(1) @ self.turned))


def test_the_order_of_a_parameters_memory_is_respected(world: World) -> None:
    torch.manual_seed(1)
    net = Laid()
    parameters = list(net.parameters())
    strides = [p.stride() for p in parameters]
    alone = [list(torch.autograd.grad(loss_of(net, m), parameters)) for m in range(6)]
    expected = [tree_sum_of(column) for column in zip(*alone, strict=True)]
    reduction = reduction_of(net, 6, world, 1000)
    for step in range(2):
        backward(reduction, 6, lambda m: loss_of(net, m))
        sums = summed(reduction, net)
        assert all(torch.equal(found, e) for found, e in zip(sums, expected, strict=True)), f"step {step}"
        assert [p.stride() for p in parameters] == [found.stride() for found in sums] == strides


class Branches(nn.Module):
    """Whose second layer only some microbatches use, and whose third only the others."""

    def __init__(self, used: Collection[int]) -> None:
        super().__init__()
        self.used, self.layers = used, nn.ModuleList([nn.Linear(40, 40) for _ in range(3)])

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        return self.layers[1 if microbatch in self.used else 2](torch.tanh(self.layers[0](x)))

    def loss(self, microbatch: int) -> Tensor:
        return self(inputs(microbatch), microbatch).square().sum()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("used", [{0, 1, 3}, {4}, set()], ids=str)
def test_a_parameter_that_a_microbatch_does_not_use_has_a_gradient_of_zeros(
    world: World, used: Collection[int], fast: bool
) -> None:
    torch.manual_seed(1)
    net = Branches(used)
    parameters = list(net.parameters())
    columns = zip(
        *(torch.autograd.grad(net.loss(m), parameters, allow_unused=True, materialize_grads=True) for m in range(5)),
        strict=True,
    )
    add = left_fold if fast else tree_sum_of
    expected = [add(list(column)) for column in columns]
    reduction = reduction_of(net, 5, world, 1000, fast)
    for step in range(2):
        backward(reduction, 5, net.loss)
        assert all(torch.equal(g, e) for g, e in zip(summed(reduction, net), expected, strict=True)), f"step {step}"


@pytest.mark.parametrize("fast", [False, True])
def test_no_step_is_made_of_a_part_of_the_gradients(world: World, fast: bool) -> None:
    net = model()
    reduction = reduction_of(net, 2, world, fast=fast)
    reduction.begin()
    loss_of(net, 0).backward()
    reduction.push(0)
    loss_of(net, 1).backward()  # not announced
    with pytest.raises(RuntimeError, match="a part of the gradients is missing"):
        reduction.finish()


def test_a_gradient_that_comes_in_parts_is_refused(world: World) -> None:
    """A reentrant checkpoint runs a backward of its own for each use of a parameter."""
    net = nn.Linear(40, 40)
    reduction = reduction_of(net, 1, world)
    reduction.begin()
    reduction.arm(0)
    once = checkpoint(net, inputs(0).requires_grad_(), use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"the gradient of (weight|bias) came in parts: use checkpoint"):
        checkpoint(net, once, use_reentrant=True).sum().backward()


def test_the_stats_have_every_loss_and_adds_along_the_tree(world: World) -> None:
    losses = [torch.tensor(x) for x in (1e8, 1.0, -1e8, 3.0, 1e-8)]
    exchange = StatsExchange(world, 5, flags=2)
    exchange.start(losses, [torch.tensor(2.0**24), *[torch.tensor(1.0)] * 4], (False, True), (0.5, 0.25))
    stats = exchange.finish()
    assert stats.losses.tolist() == [x.item() for x in losses]
    assert stats.tokens.item() == 2**24 + 4  # in float32 it would be 2**24
    assert stats.flags.tolist() == [0, 1]
    assert stats.times.tolist() == [[0.5, 0.25]]
    a, b, c, d, e = (x.item() for x in losses)
    assert stats.mean_loss() == ((a + b) + (c + (d + e))) / (2**24 + 4)
