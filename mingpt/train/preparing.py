"""Prepares a model for training: its memory, what of it is frozen, and how it is computed (compiled, recomputed)."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mingpt.compute.rules import trainable
from mingpt.config.schema import Config
from mingpt.config.section import Own
from mingpt.errors import UserError
from mingpt.model.language import LanguageModel

SHOWN = 40  # parameter names in one message


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
