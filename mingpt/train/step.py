"""One step: this process's microbatches, the exact sum over all, one update. A function of (state, config, step)."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mingpt.compute.stats import StepStats
from mingpt.train.context import ALONE, Hooks, StepContext
from mingpt.train.graphs import Graphs


def train_step(
    context: StepContext,
    step: int,
    batches: Iterator[Sequence[Tensor]],
    hooks: Hooks = ALONE,
    graphs: Graphs | None = None,
) -> StepStats:
    """Do step number `step`, counted from 0. The figures are on the device: reading one waits for it.

    batches: yields the tensors of this process's microbatches, in order. hooks: what happens besides computing.
    graphs: which microbatches are replayed.
    """
    model, update, reduction = context.model, context.update, context.reduction
    microbatches = context.microbatches
    losses, tokens = list[Tensor](), list[Tensor]()
    model.train()
    reduction.begin()
    hooks.begin()
    for microbatch in microbatches:
        with hooks.phase("wait"):
            batch = next(batches)
        # Of the microbatch's number, never of a rank: whoever computes it draws the same dropout.
        seed = context.plan.dropout_seed(step, microbatch)
        last = microbatch == microbatches[-1]
        graph = graphs.of(batch, seed, last) if graphs else None
        if graph:  # forward and backward at once
            loss, count = graph(batch, seed)
        else:
            tensors = [x.to(context.device, non_blocking=True) for x in batch]
            torch.manual_seed(seed)
            with context.autocast:
                loss, count = model(*tensors)
        losses.append(loss.detach())
        tokens.append(count)
        if last:
            # All figures but the gradients are known. They are sent while backward computes, which costs no time.
            context.stats.start(losses, tokens, hooks.flags(), hooks.times())
        if graph:
            graph.add(microbatch, last)
            continue
        # Autograd's hooks add each gradient to the sum as soon as it is there, so this comes before backward.
        reduction.expect(microbatch, last)
        if loss.requires_grad:  # otherwise the microbatch uses no parameter, and its gradients are zeros
            # Outside of autocast, as torch asks: backward takes the types that forward had.
            update.scaled(loss).backward()
        del loss  # and what autograd knows of it: a capture must not find that
    with hooks.phase("exchange"):
        reduction.finish()
        stats = context.stats.finish()
    with hooks.phase("update"):
        hooks.before_update()
        # Losses and counts of all processes: the update divides by all targets, and all decide alike whether to skip.
        norm = update(step, stats.losses.to(context.device), stats.tokens.to(context.device), reduction.sums)
        return replace(stats, grad_norm=norm)
