"""A device's host launches each operation of a step: their number must not grow with the world."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from config_kit import configured
from mingpt.compute.reduction import ExactReduction
from mingpt.train.factory import build
from mingpt.world.world import World, share
from update_kit import on_meta, update_of

MICROBATCHES = 512


class Counted(TorchDispatchMode):
    """How many operations ran that are more than a view of a tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class Called(TorchDispatchMode):
    """How often an operation ran."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name == self.name
        return func(*args, **(kwargs or {}))


def operations(world: World) -> tuple[int, int]:
    """Of the last backward's hooks with the sum, and of the update, for GPT-2 with two layers."""
    config, autocast = configured("model=gpt2", "model.n_layer=2", "data=random"), torch.autocast("cpu", torch.bfloat16)
    with torch.device("meta"):
        model = build(config, 50257)
        update = update_of(model, config.optimizer, config.schedule, world=world, autocast=autocast)
    reduction = ExactReduction(update.buckets, MICROBATCHES, world)
    local = share(world.rank, world.size, MICROBATCHES)
    reduction.begin()
    for microbatch in local:
        reduction.expect(microbatch, microbatch == local[-1])
        for p in reduction.place:
            p.grad = torch.empty_like(p)
    with Counted() as hooks:
        reduction.finish()
    losses, tokens = torch.empty(MICROBATCHES, dtype=torch.float64, device="meta"), torch.empty((), device="meta")
    with Counted() as updated:
        update(1, losses, tokens, reduction.sums)
    return hooks.count, updated.count


def test_operations_do_not_grow_with_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hop, then two. A copy for each process was 11,021 operations in the hooks of 64, 84,497 of 512."""
    hooks, updates = {}, {}
    for size, each in [(1, 1), (4, 1), (512, 1), (16, 4), (512, 8)]:
        hooks[size, each], updates[size, each] = operations(on_meta(monkeypatch, size // 2, size, each))
    parameters = 4 + 2 * 12
    assert max(hooks.values()) == hooks[1, 1] < 12 * parameters
    assert max(n for (_, each), n in updates.items() if each == 1) == updates[4, 1] < 8 * parameters
    assert max(updates.values()) == updates[16, 4] < 9 * parameters


@pytest.mark.parametrize(("size", "optimizer"), [(1, "adamw"), (1, "muon"), (4, "adamw")])
def test_a_rule_is_one_call_of_the_kernel_where_a_process_owns_all(
    monkeypatch: pytest.MonkeyPatch, size: int, optimizer: str
) -> None:
    """Where slices travel, each bucket has its own calls: it is on its way while the next one is updated."""
    config = configured("model=gpt2", "model.n_layer=2", "data=random", f"optimizer.name={optimizer}")
    with torch.device("meta"):
        model = build(config, 50257)
        update = update_of(model, config.optimizer, config.schedule, world=on_meta(monkeypatch, 0, size))
    buckets = [{update.rules[slot.name] for slot, _ in bucket.pieces(bucket.owned)} for bucket in update.buckets]
    adamw = [{rule for rule in of if not rule.muon} for of in buckets]
    assert len(update.buckets) > 3  # otherwise a call a bucket would be as good
    with Called("aten::_fused_adamw_") as kernel:
        update(
            1,
            torch.empty(8, dtype=torch.float64, device="meta"),
            torch.empty((), device="meta"),
            [torch.empty_like(bucket.local) for bucket in update.buckets],
        )
    assert kernel.count == (len(set().union(*adamw)) if size == 1 else sum(map(len, adamw)))
