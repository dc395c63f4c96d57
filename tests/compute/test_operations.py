"""A device's host launches each operation of a step: their number must not grow with the world."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from config_kit import configured
from mingpt.compute.buckets import make_buckets
from mingpt.compute.exchange import narrow_names, pack
from mingpt.compute.optimizer import Update, roles, rules
from mingpt.compute.reduction import ExactReduction
from mingpt.train.factory import build, trainable
from mingpt.world.world import share
from snapshot_kit import ALONE

META = replace(ALONE, device=torch.device("meta"), backend="nccl")
MICROBATCHES = 512


class Counted(TorchDispatchMode):
    """How many operations ran that are more than a view of a tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operations(world: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Of the last backward's hooks with the sum, and of the update, for GPT-2 with two layers."""
    for name in ("exchange.all_to_all", "exchange.all_gather", "optimizer.all_gather"):
        monkeypatch.setattr(f"mingpt.compute.{name}", lambda *_, **__: SimpleNamespace(wait=int))
    config, autocast = configured("model=gpt2", "model.n_layer=2", "data=random"), torch.autocast("cpu", torch.bfloat16)
    with torch.device("meta"):
        model = build(config, 50257)
        named = trainable(model)
        buckets = make_buckets(named, set(), world, True)
        update = Update(
            buckets, rules(named, config.optimizer, roles(model)), config.optimizer, config.schedule, world,
            global_size=MICROBATCHES, tokens_per_microbatch=1024, fp16=False, health=config.health,
            in_16_bits=pack(buckets, narrow_names(model, autocast), autocast),
        )  # fmt: skip
    reduction = ExactReduction(buckets, MICROBATCHES, world)
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
    for size, each in [(1, 1), (4, 1), (16, 1), (64, 1), (512, 1), (16, 4), (64, 8), (512, 8)]:
        world = replace(META, rank=size // 2, size=size)
        if each > 1:
            inside, across = replace(META, rank=0, size=each), replace(META, rank=size // 2 // each, size=size // each)
            world = replace(world, inside=inside, across=across)
        hooks[size, each], updates[size, each] = operations(world, monkeypatch)
    parameters = 4 + 2 * 12
    assert max(hooks.values()) == hooks[1, 1] < 12 * parameters
    assert max(n for (_, each), n in updates.items() if each == 1) == updates[4, 1] < 8 * parameters
    assert max(updates.values()) == updates[16, 4] < 9 * parameters
