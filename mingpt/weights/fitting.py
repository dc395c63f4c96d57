"""Compare weights in Hugging Face's form with the configured model: everything that does not fit, and what to set."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mingpt.config.section import LARGEST
from mingpt.data.vocabulary import Vocabulary
from mingpt.model.gpt2 import GPT
from mingpt.model.language import LanguageModel
from mingpt.model.modern import Modern
from mingpt.weights.form import Form
from mingpt.weights.gpt2 import GPT2Form
from mingpt.weights.qwen3 import Qwen3Form
from mingpt.weights.tokenizer import numbers_in, tokenizer_files

SHOWN = 4  # names in one message


def form_of(model: LanguageModel) -> Form:
    if isinstance(model, Modern):
        return Qwen3Form(model)
    assert isinstance(model, GPT)
    return GPT2Form(model)


def config_problems(config: Mapping[str, Any], form: Form) -> list[str]:
    """How a config.json differs from the model section and the data's vocabulary, with what to set."""
    shape, sizes = form.config, form.sizes(config)
    if wrong := [f"{theirs}={value!r}" for theirs, value in sizes.values() if not _is_size(value)]:
        return [f"config.json says {', '.join(wrong)}: give whole numbers from 1 to {LARGEST}"]
    problems = form.problems(config)
    rows, positions = sizes.pop("vocab_size")[1], sizes.pop("block_size")
    if different := {ours: size for ours, size in sizes.items() if size[1] != getattr(shape, ours)}:
        theirs = ", ".join(f"{name} {value}" for name, value in different.values())
        own = ", ".join(f"{name} {getattr(shape, name)}" for name in different)
        cure = " ".join(f"model.{name}={value}" for name, (_, value) in different.items())
        problems.append(f"the weights have {theirs}, the model has {own}: set {cure}")
    if shape.block_size > positions[1]:
        problems.append(
            f"the weights have {positions[1]} positions, and model.block_size={shape.block_size}: set "
            f"model.block_size={positions[1]} or less"
        )
    if rows not in (shape.vocab_size, shape.padded_vocab_size):
        few = 0 < rows - shape.vocab_size < rows / 100  # Qwen3's: 267 of 151,936
        multiples = [2**i for i in range(1, 9) if rows % 2**i == 0 and 0 < rows - shape.vocab_size < 2**i]
        multiple = next(iter(multiples), rows if few else 0)
        padding = f"; if the rest of them is padding, set model.vocab_multiple={multiple}" if multiple else ""
        problems.append(
            f"the weights are for {rows} tokens, and the data's vocabulary has {shape.vocab_size}: take data in the "
            f"tokens that the weights were trained with{padding}"
        )
    return problems


def tensor_problems(tensors: Mapping[str, Tensor], config: Mapping[str, Any], form: Form) -> list[str]:
    """How the tensors, under our names, differ from what their own config.json says."""
    sizes = form.sizes(config)
    rows, positions = sizes["vocab_size"][1], sizes["block_size"][1]
    theirs = replace(form.config, vocab_size=rows, block_size=positions, vocab_multiple=1)
    with torch.device("meta"):  # shapes only
        expected = form.model(theirs).state_dict()
    found = {name: tensor for name, tensor in tensors.items() if not (form.tied and name == form.head)}
    problems = [
        *_named("tensors are missing: ", expected.keys() - found.keys()),
        *_named(f"tensors that {form.name} does not have: ", found.keys() - expected.keys()),
        *_named(
            "tensors of other shapes than config.json says: ",
            {
                f"{n} {list(t.shape)} in place of {list(expected[n].shape)}"
                for n, t in found.items()
                if n in expected and t.shape != expected[n].shape
            },
        ),
        *_named(
            "tensors that do not hold floating-point numbers: ",
            {f"{n} ({t.dtype})".replace("torch.", "") for n, t in found.items() if not t.is_floating_point()},
        ),
    ]
    if not problems:
        problems += _named(
            "tensors with numbers that are not finite: ",
            {n for n, t in found.items() if not torch.isfinite(t.float()).all()},  # torch has no isfinite for float8
        )
    if problems:
        return ["the file does not hold the weights that config.json describes: " + "; ".join(problems)]
    head = tensors.get(form.head)
    if form.tied and head is not None and not torch.equal(head, tensors[form.embedding]):
        return [
            f"{form.head} is not {form.embedding}, but the model uses its embedding as output layer: take weights in "
            f"which both are equal"
        ]
    return []


def _is_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= LARGEST


def _named(what: str, names: set[str]) -> Iterator[str]:
    """One message with the first few names; none without names."""
    if names:
        shown, rest = sorted(names)[:SHOWN], len(names) - SHOWN
        yield what + ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def vocabulary_problems(tokenizer: Mapping[str, str], vocabulary: Vocabulary) -> list[str]:
    """Tokens whose numbers differ between the tokenizer files beside the weights and the data."""
    try:
        theirs = numbers_in(tokenizer)
    except (ValueError, RecursionError):
        return [f"{' or '.join(tokenizer)} is damaged: copy it again, or delete it if the tokens are right"]
    ours = numbers_in(tokenizer_files(vocabulary.to_json()))
    if theirs is None or ours is None or theirs == ours:
        return []
    other = sorted(t for t in theirs.keys() | ours.keys() if theirs.get(t) != ours.get(t))
    shown = ", ".join(f"{token!r} ({theirs.get(token)}, {ours.get(token)})" for token in other[:SHOWN])
    return [
        f"{len(other)} tokens have other numbers in the tokenizer beside the weights than in the data: {shown}: take "
        f"data in the tokens that the weights were trained with"
    ]
