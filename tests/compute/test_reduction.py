"""mingpt.compute.reduction: one order of additions, whoever adds. (With several processes: test_exactness.py.)"""

from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mingpt.compute.reduction import (
    ExactReduction,
    FastReduction,
    Reduction,
    middle,
    parents,
    tree_sum,
    tree_sum_of,
    whole_nodes,
)
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


def ancestors_of(count: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Each node of the tree over `count` with the nodes above it."""
    above: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def walk(a: int, b: int, path: list[tuple[int, int]]) -> None:
        above[a, b] = path
        if b - a > 1:
            walk(a, (a + b) // 2, [*path, (a, b)])
            walk((a + b) // 2, b, [*path, (a, b)])

    walk(0, count, [])
    return above


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


@pytest.mark.parametrize("count", COUNTS)
def test_each_node_but_the_root_has_one_parent_and_one_sibling(count: int) -> None:
    family = parents(count)
    nodes = ancestors_of(count)
    assert set(family.values()) == {node for node in nodes if node[1] - node[0] > 1}
    assert len(family) == count - 1
    children = [child for siblings in family for child in siblings]
    assert sorted([*children, (0, count)]) == sorted(nodes)
    for (left, right), parent in family.items():
        assert (left[0], left[1], right[1]) == (parent[0], right[0], parent[1])


@pytest.mark.parametrize("count", COUNTS)
def test_the_shares_nodes_tile_all_microbatches_in_order(count: int) -> None:
    above = ancestors_of(count)
    for world in range(1, count + 1):
        shares = [share(rank, world, count) for rank in range(world)]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        own = [whole_nodes(s.start, s.stop, 0, count) for s in shares]
        nodes = [node for nodes in own for node in nodes]
        assert [m for a, b in nodes for m in range(a, b)] == list(range(count))
        for found, s in zip(own, shares, strict=True):
            assert all(node in above for node in found)
            # The largest ones: the node above reaches out of the share.
            assert all(not (s.start <= a and b <= s.stop) for node in found for a, b in above[node][-1:])


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


@pytest.mark.parametrize("count", range(4, 41))
def test_a_left_fold_gives_other_bits(count: int) -> None:
    """So that the equalities here can fail."""
    values = leaves(count, seed=1)
    assert not torch.equal(left_fold(values), tree_sum_of(values))
    assert torch.allclose(left_fold(values), tree_sum_of(values), atol=0.1)


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
    """Each microbatch's, computed alone, without DDP."""
    net = model()
    return [list(torch.autograd.grad(loss_of(net, m), list(net.parameters()))) for m in range(count)]


def backward(
    ddp: DistributedDataParallel, reduction: Reduction, count: int, loss: Callable[[int], Tensor] | None = None
) -> None:
    """A step's gradients, as the trainer computes them."""
    for m in range(count):
        last = m == count - 1
        with nullcontext() if last else ddp.no_sync():
            (loss(m) if loss else loss_of(ddp, m)).backward()
        if not last:
            reduction.push(m)
    reduction.finish()


def buckets(ddp: DistributedDataParallel) -> int:
    return len(ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(","))


@pytest.mark.parametrize("bucket_mb", [0.001, 25])
@pytest.mark.parametrize("count", range(1, 9))
def test_exact_reduction_gives_the_tree_sum_of_the_gradients(world: World, count: int, bucket_mb: float) -> None:
    net = model()
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    reduction = ExactReduction(ddp, count, world)
    expected = [tree_sum_of(column) for column in zip(*gradients(count), strict=True)]
    folded = [left_fold(list(column)) for column in zip(*gradients(count), strict=True)]
    for step in range(3):  # DDP rebuilds its buckets after the first
        ddp.zero_grad(set_to_none=True)
        deepest = 0
        for m in range(count):
            last = m == count - 1
            with nullcontext() if last else ddp.no_sync():
                loss_of(ddp, m).backward()
            if not last:
                reduction.push(m)
                deepest = max(deepest, len(reduction.stack))
        reduction.finish()
        found = [p.grad for p in net.parameters()]
        assert all(g is not None and torch.equal(g, e) for g, e in zip(found, expected, strict=True)), f"step {step}"
        assert deepest <= count.bit_length()  # 1 + log2(count), rounded down
        assert (reduction.stack, reduction.exchanges) == ([], [])
    assert (buckets(ddp) > 1) == (bucket_mb < 1)
    # A plain accumulation is another sum from four on, so the equality above is no accident. (The tree of three is
    # a + (b + c), that of two a + b.)
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


@pytest.mark.parametrize("bucket_mb", [0.001, 25])
def test_the_order_of_a_parameters_memory_is_respected(world: World, bucket_mb: float) -> None:
    torch.manual_seed(1)
    net = Laid()
    parameters = list(net.parameters())
    alone = [list(torch.autograd.grad(loss_of(net, m), parameters)) for m in range(6)]
    expected = [tree_sum_of(column) for column in zip(*alone, strict=True)]
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    reduction = ExactReduction(ddp, 6, world)
    for step in range(3):
        ddp.zero_grad(set_to_none=True)
        backward(ddp, reduction, 6)
        for (name, p), e in zip(net.named_parameters(), expected, strict=True):
            assert p.grad is not None
            assert torch.equal(p.grad, e), f"{name}, step {step}"
            assert p.grad.stride() == p.stride()


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
@pytest.mark.parametrize("bucket_mb", [0.001, 25])
@pytest.mark.parametrize("used", [{0, 1, 3}, {1, 4}, {4}, {0, 1, 2, 3, 4}, set()], ids=str)
def test_a_parameter_that_a_microbatch_does_not_use_has_a_gradient_of_zeros(
    world: World, used: Collection[int], bucket_mb: float, fast: bool
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
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    reduction = FastReduction(ddp) if fast else ExactReduction(ddp, 5, world)
    for step in range(3):
        ddp.zero_grad(set_to_none=True)
        backward(ddp, reduction, 5, lambda m: ddp(inputs(m), m).square().sum())
        for i, (p, e) in enumerate(zip(parameters, expected, strict=True)):
            assert p.grad is not None
            assert torch.equal(p.grad, e), f"parameter {i}, step {step}"


def test_no_step_is_made_of_a_part_of_the_gradients(world: World) -> None:
    ddp = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    reduction = ExactReduction(ddp, 2, world)
    with ddp.no_sync():
        loss_of(ddp, 0).backward()
    with pytest.raises(RuntimeError, match="0 of 3403 elements of the gradients have been reduced"):
        reduction.finish()


def test_fast_reduction_gives_the_left_fold(world: World) -> None:
    net = model()
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=True)
    reduction = FastReduction(ddp)
    backward(ddp, reduction, 5)
    for p, column in zip(net.parameters(), zip(*gradients(5), strict=True), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad, left_fold(list(column)))


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
