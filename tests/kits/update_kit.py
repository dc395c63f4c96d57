"""An update in a world of one, and its gradients from where backward leaves them; or in one that sends nothing."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from mingpt.compute.buckets import Bucket, make_buckets
from mingpt.compute.exchange import pack
from mingpt.compute.optimizer import Update
from mingpt.compute.own import OwnUpdate
from mingpt.compute.rules import muon_names, roles, rules, trainable
from mingpt.config.schema import Health, Optimizer, Schedule
from mingpt.config.section import Own
from mingpt.model.language import LanguageModel
from mingpt.world.world import World
from tests.kits.snapshot_kit import ALONE


def on_meta(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, each: int = 1) -> World:
    """A process whose tensors hold no numbers, and which sends nothing. each: processes on a node, if more than one."""
    for name in ("exchange.all_to_all", "exchange.all_gather", "optimizer.all_gather"):
        monkeypatch.setattr(f"mingpt.compute.{name}", lambda *_, **__: SimpleNamespace(wait=int))
    world = replace(ALONE, rank=rank, size=size, device=torch.device("meta"), backend="nccl")
    if each == 1:
        return world
    inside, across = replace(world, rank=0, size=each), replace(world, rank=rank // each, size=size // each)
    return replace(world, inside=inside, across=across)


def update_of(
    model: nn.Module,
    config: Optimizer,
    schedule: Schedule,
    *,
    world: World = ALONE,
    global_size: int = 64,
    tokens_per_microbatch: int = 1,
    fp16: bool = False,
    buckets: Sequence[Bucket] = (),
    autocast: torch.autocast | None = None,
    health: Health | None = None,
) -> Update:
    """The update of a model's parameters. The options are Update's."""
    named, role_of = trainable(model), roles(model)
    buckets = buckets or make_buckets(named, muon_names(config.name, role_of), world, world.size > 1)
    by_name = rules(named, config, role_of)
    return Update(
        buckets,
        by_name,
        config,
        schedule,
        world,
        global_size=global_size,
        tokens_per_microbatch=tokens_per_microbatch,
        fp16=fp16,
        health=health or Health(),
        in_16_bits=pack(buckets, model.linear_matrices() if isinstance(model, LanguageModel) else set(), autocast),
        own=OwnUpdate(config, buckets, by_name, world) if isinstance(config, Own) else None,
    )


def sums_of(update: Update) -> list[Tensor]:
    """The gradients in .grad, as the reduction of one process gives them. .grad is empty then."""
    sums = [torch.zeros_like(bucket.weights) for bucket in update.buckets]
    for i, slot in update.slots.values():
        if slot.parameter.grad is not None:
            update.buckets[i].view(sums[i], slot).copy_(slot.parameter.grad)
        slot.parameter.grad = None
    return sums


def state_of(update: Update) -> dict[str, Tensor]:
    """All of it: a world of one shares it with nobody."""
    return {name: tensor for name, tensor in update.state().items() if isinstance(tensor, Tensor)}


def one_step(update: Update, loss: Callable[[], tuple[Tensor, Tensor]], step: int) -> Tensor:
    """Returns the gradient's norm."""
    total, count = loss()
    update.scaled(total).backward()
    return update(step, total.detach().view(1).double(), count, sums_of(update))
