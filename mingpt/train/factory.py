"""Builds the model of a config, and prepares it for training."""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mingpt.compute.batches import derive
from mingpt.compute.optimizer import trainable
from mingpt.config.schema import Config
from mingpt.config.section import Own
from mingpt.errors import UserError
from mingpt.model.language import LanguageModel
from mingpt.train import own_model

SHOWN = 40  # parameter names in one message


def build(config: Config, vocab_size: int) -> nn.Module:
    """The model with its initial weights on the CPU, the same in every process.

    vocab_size: 0 if the data has no tokens. Raises UserError if the model can't be built.
    """
    torch.set_num_threads(config.train.threads)  # the bits of an initialisation may depend on it
    torch.manual_seed(derive("weights", config.seed))
    model = config.model.build(vocab_size)
    if isinstance(config.model, Own):
        own_model.check_module(model, config.model)
    freeze(model, config.train.freeze)
    return model


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
        self.layer, self.compute = (
            (layer,),
            compute,
        )  # in a tuple: a child would have its weights, too

    def train(self, mode: bool = True) -> "Wrapped":
        self.layer[0].train(mode)
        return super().train(mode)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.compute(*inputs, **named)


def prepare(config: Config, model: nn.Module) -> None:
    """Change how the model computes: compiled, recomputed, its loss in pieces. Weights and their names stay.

    Each block is compiled by itself: of a model that is compiled whole, the gradients come at the end of backward all
    at once, and sending them can't overlap it. One compilation serves all blocks.
    """
    compiled = config.train.compile
    if not isinstance(model, LanguageModel):
        if compiled:
            model.compile()
        return
    model.prepare_loss(compiled, config.train.loss_rows)
    if not compiled and config.train.recompute != "block":
        return
    blocks = model.blocks()
    for i, block in enumerate(blocks):
        compute = torch.compile(block.forward) if compiled else block.forward
        if config.train.recompute == "block":
            compute = partial(checkpoint, compute, use_reentrant=False)
        blocks[i] = Wrapped(block, compute)
