"""A model of one's own: what it must be, and what it must not do while it trains."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from mingpt.config.plugin import describe
from mingpt.config.section import Own
from mingpt.errors import UserError
from mingpt.snapshot.format import DTYPES
from mingpt.world.world import World

CURE = "take a layer without running statistics (LayerNorm, GroupNorm in place of BatchNorm)"
# What the optimizer remembers besides its moments: one snapshot has one tensor of a name.
RESERVED = {"loss_scale", "loss_scale.finite_steps"}


def check_module(made: object, settings: Own) -> None:
    """Raise UserError if what somebody's code has built is no module, or holds what no snapshot can."""
    shown = f"model._target_={settings.target}"
    if not isinstance(made, nn.Module):
        raise UserError(f"{shown} gives a {type(made).__name__}, and no torch.nn.Module")
    if lazy := [n for n, p in made.named_parameters() if isinstance(p, UninitializedParameter)]:
        raise UserError(
            f"{shown}: {', '.join(lazy)} have no shape before the first forward: give the layers their sizes"
        )
    state = made.state_dict()
    if others := [n for n, v in state.items() if not isinstance(v, Tensor) or v.dtype not in DTYPES]:
        raise UserError(f"{shown}: snapshots hold plain tensors, and its state_dict has others: {', '.join(others)}")
    if taken := sorted(state.keys() & RESERVED):
        raise UserError(f"{shown}: snapshots have tensors of their own named {', '.join(taken)}: take other names")
    if views := [n for n, p in made.named_parameters() if torch.empty_like(p).stride() != p.stride()]:
        raise UserError(
            f"{shown}: {', '.join(views)} are views into other memory (expanded, or with gaps), which can't be "
            f"trained: give them their own, as nn.Parameter(x.clone())"
        )
    if not any(p.requires_grad for p in made.parameters()):
        raise UserError(f"{shown} has no parameter to train")


def try_out(model: nn.Module, settings: Own, microbatch: Sequence[Tensor]) -> None:
    """One forward and backward, to see that the protocol is kept. Raises UserError; leaves the model as it was."""
    shown = f"model._target_={settings.target}"
    takes = f"forward({', '.join(f'{list(x.shape)} {str(x.dtype)[6:]}' for x in microbatch)})"
    buffers = copy_buffers(model)
    model.train()
    try:
        answer = model(*microbatch)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{shown}: {takes} failed: {describe(error, type(model))}") from error
    parts = answer if isinstance(answer, tuple) else (answer,)
    got = ", ".join(f"{list(x.shape)} {x.device.type}" if isinstance(x, Tensor) else type(x).__name__ for x in parts)
    scalar = f"[] {microbatch[0].device.type}"
    if got != f"{scalar}, {scalar}":
        raise UserError(f"{shown}: {takes} must give (loss_sum, count), scalar tensors on its device, and gave ({got})")
    loss, count = answer
    if loss.dtype != torch.float32 or not loss.requires_grad:
        raise UserError(f"{shown}: loss_sum must be float32 and depend on the parameters")
    if not torch.isfinite(loss):
        raise UserError(f"{shown}: {takes} gives the loss {loss.item()}: no step could be made from it")
    if not torch.isfinite(count) or count < 0:
        raise UserError(f"{shown}: {takes} gives the count {count.item()}: it is how many targets the loss is over")
    try:
        loss.backward()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        hint = ", or choose reduce=fast" if "deterministic" in str(error) else ""
        raise UserError(
            f"{shown}: backward after {takes} failed: {describe(error, type(model))}: change it{hint}"
        ) from error
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    if idle := [name for name, gradient in gradients.items() if gradient is None]:
        raise UserError(
            f"{shown}: the loss does not depend on {', '.join(idle)}: take them out, or name them in train.freeze"
        )
    if sparse := [name for name, gradient in gradients.items() if gradient is not None and gradient.is_sparse]:
        raise UserError(
            f"{shown}: {', '.join(sparse)} have sparse gradients, which can't be added up: give sparse=False"
        )
    if moving := _changed(model, buffers):
        raise UserError(
            f"{shown}: forward changes the buffers {', '.join(moving)}, which would depend on who computes what: {CURE}"
        )


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def _changed(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """The buffers that are not what they were, by their bits."""

    def same(a: Tensor, b: Tensor) -> bool:
        alike = (a.shape, a.dtype) == (b.shape, b.dtype)
        return alike and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))

    now: dict[str, Tensor] = dict(model.named_buffers())
    return [n for n in now | before if n not in now or n not in before or not same(now[n], before[n])]


def check_buffers(model: nn.Module, before: dict[str, Tensor], settings: Own, world: World) -> None:
    """Raise UserError in all processes if forward has changed a buffer in one. All call it, before each snapshot."""
    moving = {name for names in world.gather(_changed(model, before)) for name in names}
    if moving:
        raise UserError(
            f"model._target_={settings.target}: forward has changed the buffers {', '.join(sorted(moving))} since the "
            f"last snapshot, and they depend on who computed what, so this step is not stored: {CURE}"
        )
