"""A user's own model (model._target_): it must be a module that can be trained, and keep its buffers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from mingpt.config.plugin import describe
from mingpt.config.section import Own, Section
from mingpt.errors import UserError
from mingpt.snapshot.format import DTYPES
from mingpt.world.world import World

CURE = "take a layer without running statistics (LayerNorm, GroupNorm in place of BatchNorm)"
# Names of optimizer state that belong to no parameter. A snapshot can't hold two tensors of one name.
RESERVED = {"loss_scale", "loss_scale.finite_steps"}


def check_module(made: object, settings: Own) -> None:
    """Raise UserError if what the user's code has built is no torch module, or its state can't be stored."""
    key = f"model._target_={settings.target}"
    if not isinstance(made, nn.Module):
        raise UserError(f"{key} returned a value of type {type(made).__name__}, not a torch.nn.Module")
    lazy = [name for name, p in made.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise UserError(f"{key}: {', '.join(lazy)} have no shape before the first forward: give the layers their sizes")
    state = made.state_dict()
    others = list[str]()
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.dtype not in DTYPES:
            others.append(name)
    if others:
        raise UserError(
            f"{key}: its state_dict has values that snapshots can't hold: {', '.join(others)}: use plain tensors"
        )
    if taken := sorted(state.keys() & RESERVED):
        raise UserError(f"{key}: {', '.join(taken)} are names of optimizer state in snapshots: take other names")
    # In a bucket parameters lie one behind the other, each element once.
    views = [name for name, p in made.named_parameters() if torch.empty_like(p).stride() != p.stride()]
    if views:
        raise UserError(
            f"{key}: {', '.join(views)} are views into other memory (expanded, or with gaps), which can't be "
            f"trained: give them their own, as nn.Parameter(x.clone())"
        )
    if not any(p.requires_grad for p in made.parameters()):
        raise UserError(f"{key} has no parameter to train")


@contextmanager
def _told(what: str, model: nn.Module) -> Iterator[None]:
    """Turns what a user's code raises into a UserError."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    # SystemExit, too: sys.exit(0) in a user's model was a finished run.
    except (Exception, SystemExit) as error:
        hint = ": change it, or choose reduce=fast" if "deterministic" in str(error) else ""
        raise UserError(f"{what}: {describe(error, type(model))}{hint}") from error


def try_out(model: nn.Module, settings: Own, microbatch: Sequence[Tensor]) -> None:
    """Run one forward and backward. Raises UserError if the model breaks the protocol. Leaves the model as it was."""
    key = f"model._target_={settings.target}"
    called = f"forward({', '.join(f'{list(x.shape)} {str(x.dtype)[6:]}' for x in microbatch)})"
    buffers = copy_buffers(model)
    # In training mode: BatchNorm and the like change their buffers only there, and that is what is looked for.
    model.train()
    with _told(f"{key}: {called} failed", model):
        output = model(*microbatch)
    parts = output if isinstance(output, tuple) else (output,)
    got = ", ".join(f"{list(x.shape)} {x.device.type}" if isinstance(x, Tensor) else type(x).__name__ for x in parts)
    scalar = f"[] {microbatch[0].device.type}"
    if got != f"{scalar}, {scalar}":
        raise UserError(f"{key}: {called} must return (loss_sum, count), scalars on its device, and returned ({got})")
    loss, count = output
    if loss.dtype != torch.float32 or not loss.requires_grad:
        raise UserError(f"{key}: loss_sum must be float32 and depend on the parameters")
    if not torch.isfinite(loss):
        raise UserError(f"{key}: {called} returned the loss {loss.item()}: it must be finite")
    if not torch.isfinite(count) or count < 0:
        raise UserError(f"{key}: {called} returned the count {count.item()}: it must be the number of targets")
    with _told(f"{key}: backward after {called} failed", model):
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    # Away before the buckets exist: a gradient that is left would be added to the first step's.
    model.zero_grad(set_to_none=True)
    idle = [name for name, gradient in gradients.items() if gradient is None]
    if idle:
        raise UserError(
            f"{key}: the loss does not depend on {', '.join(idle)}: take them out, or name them in train.freeze"
        )
    sparse = [name for name, gradient in gradients.items() if gradient is not None and gradient.is_sparse]
    if sparse:
        raise UserError(f"{key}: {', '.join(sparse)} have sparse gradients, which can't be reduced: set sparse=False")
    if moving := _changed(model, buffers):
        raise UserError(
            f"{key}: forward changes the buffers {', '.join(moving)}, so they would depend on the world size: {CURE}"
        )


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def _changed(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    """The names of buffers whose bits have changed."""

    def same(a: Tensor, b: Tensor) -> bool:
        alike = (a.shape, a.dtype) == (b.shape, b.dtype)
        # As bytes: a NaN is not equal to itself, and 0.0 is equal to -0.0.
        return alike and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))

    now: dict[str, Tensor] = dict(model.named_buffers())
    changed = list[str]()
    for name in now | before:
        if name not in now or name not in before or not same(now[name], before[name]):
            changed.append(name)
    return changed


class FixedBuffers:
    """The buffers of a user's model, which training must not change: a process sees its own microbatches only.

    So what forward writes to a buffer depends on the world size, and no snapshot can hold it for another one.
    """

    def __init__(self, model: nn.Module, settings: Section, world: World) -> None:
        """Remember the buffers as they are. Those of the package's own models are never written to."""
        self.model, self.settings, self.world = model, settings, world
        self.before = copy_buffers(model) if isinstance(settings, Own) else {}

    def check(self) -> None:
        """Raise UserError in all processes if a buffer of one of them has changed. Collective."""
        if not isinstance(self.settings, Own):
            return
        moving = set[str]().union(*self.world.gather(_changed(self.model, self.before)))
        if moving:
            raise UserError(
                f"model._target_={self.settings.target}: forward has changed the buffers {', '.join(sorted(moving))} "
                f"since the last snapshot, so they depend on the world size, and this step is not stored: {CURE}"
            )
