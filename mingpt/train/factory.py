"""Builds the model of a config and prepares it for training; builds the GPT of a snapshot."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from torch.utils.checkpoint import checkpoint

from mingpt.compute.batches import derive
from mingpt.config.kinds import KINDS
from mingpt.config.schema import Config
from mingpt.config.section import Own
from mingpt.errors import UserError
from mingpt.model.gpt2 import GPTModel
from mingpt.model.language import Language, LanguageModel
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


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are not frozen. Only these are reduced and updated, and have optimizer state."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


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


def language_kind(name: object) -> type[Language]:
    """The kind of language model of that name; of GPT-2 if there is none."""
    found = KINDS["model"].get(str(name), GPTModel)
    return found if issubclass(found, Language) else GPTModel


def gpt_of(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[str, Sequence[int]]], vocab_size: int, where: str
) -> LanguageModel:
    """The GPT that a snapshot's manifest describes, on the meta device: without memory for its weights.

    shapes: dtype and shape of each of the snapshot's weights. where: names the snapshot in messages. Raises UserError
    if the snapshot is not one of this package's GPT. Nothing is imported because a manifest names it.
    """
    section = config.get("model")
    if isinstance(section, dict) and section.get("kind") == "own":
        raise UserError(
            f"{where}: a snapshot of {section.get('_target_')!r}, not of mingpt's GPT: load its model-*.safetensors "
            f"in a program of your own"
        )
    other = f"{where}: not a snapshot of a GPT of this version: "
    try:
        kind = section.get("kind") if isinstance(section, dict) else None
        model = language_kind(kind).model_validate(section)
        if problem := model.impossible_shape():
            raise ValueError(problem)
        if differences := _differences(model, vocab_size, shapes):
            raise ValueError(differences)
        with torch.device("meta"):
            return model.build(vocab_size)
    except (ValidationError, ValueError, TypeError, RuntimeError, OverflowError) as error:  # torch's: absurd sizes
        raise UserError(f"{other}{str(error).splitlines()[0]}") from error


def _differences(model: Language, vocab_size: int, shapes: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    """The first difference between a snapshot's tensors and the GPT of its config; empty if there is none.

    Builds one layer only, since a config may claim millions of them.
    """
    with torch.device("meta"):
        small = model.model_copy(update={"n_layer": 1}).build(vocab_size)
    one, prefix = small.state_dict(), small.LAYER
    layer = {name: tensor for name, tensor in one.items() if name.startswith(prefix)}
    if len(shapes) != len(one) + (model.n_layer - 1) * len(layer):
        return f"n_layer={model.n_layer}, and {len(shapes)} tensors"
    expected = {name: tensor.shape for name, tensor in one.items()}
    for i in range(1, model.n_layer):
        here = prefix.replace(".0.", f".{i}.")
        expected |= {name.replace(prefix, here, 1): tensor.shape for name, tensor in layer.items()}
    for name, wanted in expected.items():
        dtype, found = shapes.get(name, ("none", []))
        if (dtype, list(found)) != ("F32", list(wanted)):
            return f"{name} should be F32 {list(wanted)}, and is {dtype} {list(found)}"
    return ""
