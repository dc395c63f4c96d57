"""Compare a GPT-2 from Hugging Face with the configured model: everything that does not fit, and what to set."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mingpt.config.section import LARGEST
from mingpt.data.vocabulary import Vocabulary
from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.weights.tokenizer import numbers_in, tokenizer_files

# What a config.json leaves out has these values: the defaults of transformers' GPT2Config.
DEFAULTS = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}
# The values of the published GPT-2. transformers also knows variants, which our model does not compute.
PUBLISHED: dict[str, tuple[object, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"
SHOWN = 4  # names in one message


def config_problems(config: Mapping[str, Any], shape: GPTConfig) -> list[str]:
    """How a config.json differs from the model section and the data's vocabulary, with what to set."""
    sizes = DEFAULTS | {name: config[name] for name in DEFAULTS if name in config}
    if wrong := [f"{name}={value!r}" for name, value in sizes.items() if not _is_size(value)]:
        return [f"config.json says {', '.join(wrong)}: give whole numbers from 1 to {LARGEST}"]
    problems = [
        f"weights of another architecture: config.json says {name}={config[name]!r}, GPT-2 has {known[0]!r}"
        for name, known in PUBLISHED.items()
        if config.get(name, known[0]) not in known
    ]
    if (inner := config.get("n_inner")) not in (None, 4 * sizes["n_embd"]):
        problems.append(f"weights of another architecture: config.json says n_inner={inner!r}, not 4 x n_embd")
    different = [name for name in ("n_layer", "n_head", "n_embd") if sizes[name] != getattr(shape, name)]
    if different:
        theirs = ", ".join(f"{name} {sizes[name]}" for name in different)
        ours = ", ".join(f"{name} {getattr(shape, name)}" for name in different)
        cure = " ".join(f"model.{name}={sizes[name]}" for name in different)
        problems.append(f"the weights have {theirs}, the model has {ours}: set {cure}")
    if shape.block_size > sizes["n_positions"]:
        problems.append(
            f"the weights have {sizes['n_positions']} positions, and model.block_size={shape.block_size}: set "
            f"model.block_size={sizes['n_positions']} or less"
        )
    if sizes["vocab_size"] not in (shape.vocab_size, shape.padded_vocab_size):
        rows = sizes["vocab_size"]
        multiple = next(
            (m for m in (2**i for i in range(1, 9)) if rows % m == 0 and 0 < rows - shape.vocab_size < m), 0
        )
        padding = f"; if the rest of them is padding, set model.vocab_multiple={multiple}" if multiple else ""
        problems.append(
            f"the weights are for {rows} tokens, and the data's vocabulary has {shape.vocab_size}: take data in the "
            f"tokens that the weights were trained with{padding}"
        )
    return problems


def tensor_problems(tensors: Mapping[str, Tensor], config: Mapping[str, Any], shape: GPTConfig) -> list[str]:
    """How the tensors, under our names, differ from what their own config.json says."""
    sizes = DEFAULTS | {name: config[name] for name in DEFAULTS if name in config}
    with torch.device("meta"):  # shapes only
        theirs = replace(shape, vocab_size=sizes["vocab_size"], block_size=sizes["n_positions"], vocab_multiple=1)
        expected = GPT(theirs).state_dict()
    found = {name: tensor for name, tensor in tensors.items() if name != HEAD}
    problems = [
        *_named("tensors are missing: ", expected.keys() - found.keys()),
        *_named("tensors that GPT-2 does not have: ", found.keys() - expected.keys()),
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
    head = tensors.get(HEAD)
    if head is not None and not torch.equal(head, tensors[EMBEDDING]):
        return [
            f"{HEAD} is not {EMBEDDING}, but the model uses its embedding as output layer: take weights in which both "
            f"are equal"
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
