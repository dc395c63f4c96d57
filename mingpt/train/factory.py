"""Builds the model of a config and prepares it for training; builds the GPT of a snapshot."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mingpt.compute.batches import derive
from mingpt.compute.optimizer import trainable
from mingpt.config.schema import Config
from mingpt.config.section import Own
from mingpt.errors import UserError
from mingpt.model.language import LanguageModel
from mingpt.model.pieces import loss_in_pieces
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


def prepare(config: Config, model: nn.Module) -> None:
    """What changes how a model computes, and neither its weights nor their names.

    Each block is compiled by itself: of a model that is compiled whole, the gradients come at the end of backward all
    at once, and sending them can't overlap it. One compilation serves all blocks.
    """
    if not isinstance(model, LanguageModel):
        if config.train.compile:
            model.compile()
        return
    for block in model.blocks():
        if config.train.compile:
            block.forward = torch.compile(block.forward)
        if config.train.recompute == "block":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if config.train.compile:
        model.loss_of = torch.compile(model.loss_of)  # type: ignore[method-assign]
    if config.train.loss_rows:
        model.forward = partial(loss_in_pieces, model, config.train.loss_rows)  # type: ignore[method-assign]
