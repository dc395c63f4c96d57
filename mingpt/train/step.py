"""One step: this process's microbatches, the exact sum over all, one update. A function of (state, config, step)."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mingpt.train.stats import StepStats

if TYPE_CHECKING:
    from mingpt.train.run import Run


def train_step(run: "Run", step: int) -> StepStats:
    """Do step number `step`, counted from 0. The figures are on the device: reading one waits for it."""
    model, update, plan, device = run.compute.model, run.compute.update, run.compute.plan, run.compute.device
    clock = run.lifetime.clock
    model.train()
    run.reduction.begin()
    losses, tokens = list[Tensor](), list[Tensor]()
    run.times.begin()
    if run.audit:
        with clock.within("audit"):
            run.audit.before(step)
    for microbatch in run.mine:
        with clock.within("wait"):
            batch = next(run.batches)
        tensors = [x.to(device, non_blocking=True) for x in batch]
        torch.manual_seed(plan.dropout_seed(step, microbatch))
        last = microbatch == run.mine[-1]
        with run.compute.autocast:
            loss, count = model(*tensors)
        losses.append(loss)
        tokens.append(count)
        if last:  # all figures but the gradients are known; they are sent while backward computes
            run.stats.start(losses, tokens, (run.lifetime.stop, *run.checkpointer.flags()), run.times())
            run.reduction.arm(microbatch)
        if loss.requires_grad:  # otherwise the microbatch uses no parameter, and its gradients are zeros
            update.scaled(loss).backward()
        if not last:
            run.reduction.push(microbatch)
    with clock.within("exchange"):
        run.reduction.finish()
        stats = run.stats.finish()
    if run.audit:
        with clock.within("audit"):
            run.audit.after(step)
    with clock.within("update"):
        run.checkpointer.before_update()
        norm = update(step, stats.losses.to(device), stats.tokens.to(device), run.reduction.sums)
        return replace(stats, grad_norm=norm)
