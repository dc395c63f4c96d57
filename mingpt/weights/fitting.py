"""Compare weights in Hugging Face's form with the configured model: everything that does not fit, and what to set."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mingpt.config.section import LARGEST
from mingpt.data.source import Vocabulary
from mingpt.model.gpt2 import GPT
from mingpt.model.language import LanguageModel
from mingpt.model.modern import Modern
from mingpt.weights.gpt2 import GPT2Form
from mingpt.weights.qwen3 import Qwen3Form
from mingpt.weights.tokens import numbers_in, tokenizer_json

Form = GPT2Form | Qwen3Form
SHOWN = 4  # tokens in one message
LONGEST = 1000  # characters of torch's list of tensors
THEIR_TOKENS = (
    "take data in the tokens that the weights were trained with: if a tokenizer.json lies beside them, set "
    "data.tokens=bpe and data.tokenizer=… to their place"
)


def form_of(model: LanguageModel) -> Form:
    if isinstance(model, Modern):
        return Qwen3Form(model)
    assert isinstance(model, GPT)
    return GPT2Form(model)


def config_problems(config: Mapping[str, Any], form: Form) -> list[str]:
    """Say how a config.json differs from the model section and the data's vocabulary, with what to set."""
    shape, sizes = form.config, form.sizes(config)
    # First, and alone: the comparisons below are of whole numbers, and a stranger's file may hold anything.
    if wrong := [f"{theirs}={value!r}" for theirs, value in sizes.values() if not _is_size(value)]:
        return [f"config.json says {', '.join(wrong)}: give whole numbers from 1 to {LARGEST}"]
    problems = list[str]()
    for key, known in form.published.items():
        if config.get(key, known[0]) not in known:
            problems.append(
                f"weights of another architecture: config.json says {key}={config[key]!r}, {form.name} has {known[0]!r}"
            )
    problems += form.problems(config)
    # These two may differ: rows of padding, and fewer positions than the weights have.
    rows, positions = sizes.pop("vocab_size")[1], sizes.pop("block_size")[1]
    for ours, (theirs, value) in sizes.items():
        if value != getattr(shape, ours):
            problems.append(
                f"the weights have {theirs} {value}, the model has {ours} {getattr(shape, ours)}: set "
                f"model.{ours}={value}"
            )
    if shape.block_size > positions:
        problems.append(
            f"the weights have {positions} positions, and model.block_size={shape.block_size}: set "
            f"model.block_size={positions} or less"
        )
    if rows not in (shape.vocab_size, shape.padded_vocab_size):
        problems.append(
            f"the weights are for {rows} tokens, and the data's vocabulary has {shape.vocab_size}: {THEIR_TOKENS}"
            + f"; if those above the vocabulary are padding, set model.vocab_multiple={rows}"
            * (rows > shape.vocab_size)
        )
    return problems


def tensor_problems(tensors: Mapping[str, Tensor], config: Mapping[str, Any], form: Form) -> list[str]:
    """Say how the tensors, under our names, differ from what their own config.json says."""
    sizes = form.sizes(config)
    rows, positions = sizes["vocab_size"][1], sizes["block_size"][1]
    theirs: Any = replace(form.config, vocab_size=rows, block_size=positions, vocab_multiple=1)
    # Some files of tied models hold the embedding twice, also as a head, which our model does not have.
    own = {name: tensor for name, tensor in tensors.items() if not (form.tied and name == form.head)}
    try:
        # Shapes only: torch itself lists what is missing, unknown or of another shape.
        with torch.device("meta"):
            form.model(theirs).load_state_dict(own, assign=True)
    except RuntimeError as error:
        listed = " ".join(str(error).split())[:LONGEST]
        return [f"the file does not hold the weights that config.json describes: {listed}"]
    # float: torch has no isfinite for float8
    if wrong := [n for n, t in own.items() if not (t.is_floating_point() and torch.isfinite(t.float()).all())]:
        return [f"tensors that do not hold finite floating-point numbers: {', '.join(wrong)[:LONGEST]}"]
    head = tensors.get(form.head)
    if form.tied and head is not None and not torch.equal(head, tensors[form.embedding]):
        return [
            f"{form.head} is not {form.embedding}, but the model uses its embedding as output layer: take weights in "
            f"which both are equal"
        ]
    return []


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= LARGEST


def vocabulary_problems(tokenizer: str | None, vocabulary: Vocabulary) -> list[str]:
    """Tokens whose numbers differ between the tokenizer.json beside the weights and the data."""
    if tokenizer is None:
        return []
    fields = tokenizer_json(vocabulary.to_json())
    try:
        theirs = numbers_in(json.loads(tokenizer))
        ours = numbers_in(fields) if fields else theirs
        other = sorted(token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ["tokenizer.json is damaged: copy it again, or delete it if the tokens are right"]
    if not other:
        return []
    shown = ", ".join(f"{token!r} ({theirs.get(token)}, {ours.get(token)})" for token in other[:SHOWN])
    return [
        f"{len(other)} tokens have other numbers in the tokenizer beside the weights than in the data: {shown}: "
        f"{THEIR_TOKENS}"
    ]
