"""The module that a config's `model` names, and the GPT that a snapshot holds."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from mingpt import own
from mingpt.batches import derive
from mingpt.config import Config, Model
from mingpt.errors import Mistake
from mingpt.model import GPT, GPTConfig

SHOWN = 40  # names in one message


def gpt_config(model: Model, vocab_size: int) -> GPTConfig:
    return GPTConfig(vocab_size, **model.model_dump(include={f.name for f in fields(GPTConfig)}))


def build(config: Config, vocab_size: int) -> nn.Module:
    """The model with its first weights, on the CPU: the same in every process.

    vocab_size: 0 if the data has no tokens. Raises Mistake if it can't be built, or is none.
    """
    torch.set_num_threads(config.train.threads)  # an initialisation may be a matter of bits, too
    torch.manual_seed(derive("weights", config.seed))
    if not isinstance(config.model, Model):
        model = own.module(config.model, vocab_size)
    elif vocab_size:
        model = GPT(gpt_config(config.model, vocab_size))
    else:
        raise Mistake("the data has no tokens, and a GPT needs some: choose other data, or name a model._target_")
    freeze(model, config.train.freeze)
    return model


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that are not frozen: those that the optimizer, its state and the reduction know."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Keep what matches a pattern as it is. Raises Mistake if a pattern matches nothing, or all together everything."""
    parameters = dict(model.named_parameters())
    problems = []
    for pattern in patterns:
        matching = [p for name, p in parameters.items() if fnmatchcase(name, pattern)]
        for p in matching:
            p.requires_grad_(False)
        if not matching:
            problems.append(f"train.freeze: {pattern!r} matches no parameter; there are {some(list(parameters))}")
    if problems:
        raise Mistake(*problems)
    if patterns and not trainable(model):
        raise Mistake("train.freeze matches every parameter: nothing is left to train; take a pattern out")


def some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def gpt_of(config: Mapping[str, Any], weights: Mapping[str, Tensor], vocab_size: int, where: str) -> GPT:
    """The GPT of a snapshot, from its manifest's config and its tensors alone, on the CPU, for evaluation.

    where: names the snapshot. Raises Mistake if it is not one of a GPT of this package; what a snapshot of another
    module names is never imported.
    """
    section = config.get("model")
    if isinstance(section, dict) and section.get("kind") == "own":
        raise Mistake(
            f"{where}: a snapshot of {section.get('_target_')!r}, not of mingpt's GPT: load its model-*.safetensors "
            f"in a program of your own"
        )
    try:
        gpt = GPT(gpt_config(Model.model_validate(section), vocab_size))
        gpt.load_state_dict(dict(weights))
    except (ValidationError, ValueError, RuntimeError) as error:
        raise Mistake(f"{where}: not a snapshot of a GPT of this version: {str(error).splitlines()[0]}") from error
    return gpt.eval()
