"""Builds the model of a config, and prepares it for training.

A user's own (model._target_) is checked: that it is a module that can be trained, and keeps its buffers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from mingpt.compute.batches import derive
from mingpt.compute.rules import trainable
from mingpt.config.plugin import describe
from mingpt.config.schema import Config
from mingpt.config.section import Own, Section
from mingpt.errors import UserError
from mingpt.model.building import build_model
from mingpt.model.language import LanguageModel
from mingpt.snapshot.format import DTYPES
from mingpt.world.world import World

SHOWN = 40  # parameter names in one message


def build(config: Config, vocab_size: int, drawn: bool = True) -> nn.Module:
    """The model with its initial weights on the CPU, the same in every process.

    vocab_size: 0 if the data has no tokens. drawn: without, the package's own models are an outline, on the device
    `meta`. Most starts go on from a snapshot, which has all of their state, since they consist of parameters alone.
    `place_model` gives them memory, and `origin.restore` their initial weights, if there is no snapshot. A user's own
    is always drawn, since its __init__ may compute anything. Raises UserError if the model can't be built.
    """
    # The bits of an initialisation may depend on it.
    torch.set_num_threads(config.train.threads)
    if drawn or isinstance(config.model, Own):
        torch.manual_seed(derive("weights", config.seed))
        model = build_model(config.model, vocab_size)
    else:
        # Without a seed: torch would seed the GPU, too, and wait for it, which another thread is opening meanwhile.
        with torch.device("meta"), Undrawn():
            model = build_model(config.model, vocab_size)
    if isinstance(config.model, Own):
        check_module(model, config.model)
    freeze(model, config.train.freeze)
    return model


class Undrawn(TorchFunctionMode):
    """torch.nn.init does nothing. On `meta` it has nothing to do, and imports torch's compiler for that: a second."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Give an outline's parameters memory on the device. (Module.to_empty imports torch's compiler for that.)"""
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            empty = torch.empty(p.shape, dtype=p.dtype, device=device)
            setattr(module, name, nn.Parameter(empty, p.requires_grad))


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that match a pattern. Raises UserError if one matches none, or none is left to train."""
    parameters = dict(model.named_parameters())
    problems = []
    for pattern in patterns:
        matching = [p for name, p in parameters.items() if fnmatchcase(name, pattern)]
        for p in matching:
            p.requires_grad_(False)
        if not matching:
            problems.append(f"train.freeze: {pattern!r} matches no parameter; there are {some(list(parameters))}")
    if problems:
        raise UserError(*problems)
    if patterns and not trainable(model):
        raise UserError("train.freeze matches every parameter: nothing is left to train; take a pattern out")


def some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


class Wrapped(nn.Module):
    """A layer that is computed another way: compiled, or once more in backward. Its weights keep their names."""

    def __init__(self, layer: nn.Module, compute: Callable[..., Any]) -> None:
        super().__init__()
        for name, child in layer.named_children():
            self.add_module(name, child)
        for name, parameter in layer.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in layer.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name in layer.state_dict())
        # In a tuple, which torch does not look into: as a child, the layer would have its weights here once more.
        self.layer = (layer,)
        self.compute = compute

    def train(self, mode: bool = True) -> "Wrapped":
        self.layer[0].train(mode)
        return super().train(mode)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.compute(*inputs, **named)


def prepare(config: Config, model: nn.Module) -> None:
    """Change how the model computes: compiled, recomputed, its loss in pieces. Weights and their names stay.

    Each block is compiled by itself: of a model that is compiled whole, the gradients come at the end of backward all
    at once, and sending them can't overlap it. One compilation serves all blocks. Each shape has kernels of its own:
    those for any shape would be compiled at the second one that an attempt meets, so a resume might have others.
    """
    compiled = config.train.compile
    if compiled:
        # Beyond 8 compilations torch would compute a new shape without its compiler, and a resume there with it: other
        # bits. batch.double_at with half of the blocks frozen takes 21.
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    if not isinstance(model, LanguageModel):
        if compiled:
            model.compile(dynamic=False)
        return
    model.prepare_loss(compiled, config.train.loss_rows)
    if not compiled and config.train.recompute != "block":
        return
    blocks = model.blocks()
    for i, block in enumerate(blocks):
        # By blocks, the first bucket can be sent at 34 % of backward (eager: 31 %); of the whole model at 99 %.
        compute = torch.compile(block.forward, dynamic=False) if compiled else block.forward
        if config.train.recompute == "block":
            compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=draws(config))
        blocks[i] = Wrapped(block, compute)


def draws(config: Config) -> bool:
    """Whether a block draws random numbers: then what recomputes it needs their state, which no CUDA graph may read."""
    return isinstance(config.model, Own) or getattr(config.model, "dropout", 0) > 0


def why_no_graph(config: Config, processes: int) -> str | None:
    """Why no microbatch of this config can be replayed as a CUDA graph, or shall be. The only place that knows."""
    if 1 < processes >= config.global_size(processes) // config.batch.micro_size:
        return "each process has one a step, and sends it while it is computed"
    if config.reduce == "fast":
        return "reduce=fast adds microbatches up where a graph writes them"
    if config.train.recompute == "block" and draws(config):
        return "train.recompute=block reads the state of random numbers"
    if config.train.cuda_graphs == "auto" and isinstance(config.model, Own):
        return "auto leaves a model of your own without; true tries it"
    return None


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
