"""A device's host launches each operation of a step: their number must not grow with the world, nor with the model."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mingpt.compute.batches import BatchPlan
from mingpt.compute.optimizer import Update
from mingpt.compute.reduction import ExactReduction
from mingpt.train.context import make_context
from mingpt.train.factory import build
from mingpt.train.graphs import RECORDERS, Graphs, MicrobatchGraph
from mingpt.train.step import train_step
from mingpt.world.world import World, share
from tests.kits.config_kit import configured
from tests.kits.snapshot_kit import ALONE
from tests.kits.update_kit import on_meta, update_of

MICROBATCHES = 512


class Counted(TorchDispatchMode):
    """The names of the operations that ran and are more than a view of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def made(world: World, *settings: str, autocast: torch.autocast | None = None) -> Update:
    """Of GPT-2 with two layers."""
    config = configured("model=gpt2", "model.n_layer=2", "data=random", *settings)
    with torch.device("meta"):
        return update_of(build(config, 50257), config.optimizer, config.schedule, world=world, autocast=autocast)


def run(update: Update, sums: Sequence[Tensor]) -> list[str]:
    """The operations of an update."""
    losses, tokens = torch.empty(MICROBATCHES, dtype=torch.float64, device="meta"), torch.empty((), device="meta")
    with Counted() as counted:
        update(1, losses, tokens, sums)
    return counted.names


def test_operations_do_not_grow_with_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hop, then two. A copy for each process was 11,021 operations in the hooks of 64, 84,497 of 512."""
    hooks, updates = {}, {}
    for size, each in [(1, 1), (4, 1), (512, 1), (16, 4), (512, 8)]:
        world = on_meta(monkeypatch, size // 2, size, each)
        update = made(world, autocast=torch.autocast("cpu", torch.bfloat16))
        reduction, local = ExactReduction(update.buckets, MICROBATCHES, world), share(size // 2, size, MICROBATCHES)
        reduction.begin()
        for microbatch in local:
            reduction.expect(microbatch, microbatch == local[-1])
            for p in reduction.place:
                p.grad = torch.empty_like(p)
        with Counted() as counted:  # those of the last backward's hooks, and of the sum
            reduction.finish()
        hooks[size, each], updates[size, each] = len(counted.names), len(run(update, reduction.sums))
    parameters = 4 + 2 * 12
    assert max(hooks.values()) == hooks[1, 1] < 12 * parameters
    assert max(n for (_, each), n in updates.items() if each == 1) == updates[4, 1] < 8 * parameters
    assert max(updates.values()) == updates[16, 4] < 9 * parameters


@pytest.mark.parametrize(("size", "optimizer"), [(1, "adamw"), (1, "muon"), (4, "adamw")])
def test_a_rule_is_one_call_of_the_kernel_where_a_process_owns_all(
    monkeypatch: pytest.MonkeyPatch, size: int, optimizer: str
) -> None:
    """Where slices travel, each bucket has its own calls: it is on its way while the next one is updated."""
    update = made(on_meta(monkeypatch, 0, size), f"optimizer.name={optimizer}")
    buckets = [{update.rules[slot.name] for slot, _ in bucket.pieces(bucket.owned)} for bucket in update.buckets]
    adamw = [{rule for rule in of if not rule.muon} for of in buckets]
    assert len(update.buckets) > 3  # otherwise a call a bucket would be as good
    calls = run(update, [torch.empty_like(bucket.local) for bucket in update.buckets]).count("aten::_fused_adamw_")
    assert calls == (len(set().union(*adamw)) if size == 1 else sum(map(len, adamw)))


class Nothing:
    """A graph whose replay is no operation of the host's, as a device's."""

    def __init__(self, device: torch.device) -> None: ...
    def seed(self, seed: int) -> None: ...
    def replay(self) -> None: ...


def test_a_replayed_microbatch_costs_the_host_some_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is computed costs it some for each parameter: 758 for GPT-2, and 954 where hooks add one by one."""
    monkeypatch.setitem(RECORDERS, "meta", Nothing)
    config = configured("model=gpt2", "data=random", "batch.micro_size=2", "precision=bf16")
    world, autocast = replace(ALONE, device=torch.device("meta"), backend="nccl"), torch.autocast("cpu", torch.bfloat16)
    batch = [torch.zeros(2, 1024, dtype=torch.int64, device="meta")] * 2
    found = []
    for microbatches in (8, 16):
        with torch.device("meta"):
            model = build(config, 50257)
        context = make_context(config, model, BatchPlan(10**6, 1, 2 * microbatches, 2), world, autocast)
        assert isinstance(context.reduction, ExactReduction)
        context.reduction.by_bucket = True
        graphs = Graphs(context, context.reduction, None, print)
        graphs.graph = MicrobatchGraph(context, context.reduction, batch)
        graphs.graph._compute()
        graphs.shapes = [(x.shape, x.dtype) for x in batch]
        for step in (0, 1):
            with Counted() as counted:
                train_step(context, step, repeat(batch), graphs=graphs)
        found.append(len(counted.names))  # of the second step, in which all microbatches are replayed
    # 16 buckets: an addition each, half of them copies, half of them with padding. And one more level of losses.
    assert found[1] - found[0] == 8 * 46 + 1
