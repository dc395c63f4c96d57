"""An update in a world of one, and its gradients from where backward leaves them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mingpt.compute.buckets import BUCKET_BYTES, make_buckets
from mingpt.compute.optimizer import Update, muon_names, roles, rules, trainable
from mingpt.compute.own import OwnUpdate
from mingpt.config.schema import Health, Optimizer, Schedule
from mingpt.config.section import Own
from snapshot_kit import ALONE


def update_of(
    model: nn.Module,
    config: Optimizer,
    schedule: Schedule,
    *,
    global_size: int = 64,
    tokens_per_microbatch: int = 1,
    fp16: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> Update:
    named, role_of = trainable(model), roles(model)
    buckets = make_buckets(named, muon_names(config.name, role_of), ALONE, False, bucket_bytes)
    by_name = rules(named, config, role_of)
    return Update(
        buckets,
        by_name,
        config,
        schedule,
        ALONE,
        global_size=global_size,
        tokens_per_microbatch=tokens_per_microbatch,
        fp16=fp16,
        health=Health(),
        own=OwnUpdate(config, buckets, by_name, ALONE) if isinstance(config, Own) else None,
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
