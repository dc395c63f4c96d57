"""model.init_from: the weights of transformers' own GPT-2 give the same logits here; what does not fit is told."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mingpt.data.vocabulary import Characters, Numbers
from mingpt.errors import UserError
from mingpt.model.gpt2 import GPT
from mingpt.weights.reading import start_from
from mingpt.weights.tokens import tokenizer_json
from tests.kits.model_kit import random_tokens
from tests.kits.snapshot_kit import ALONE
from tests.kits.told import Told
from tests.kits.weights_kit import WORDS, change_config, change_weights, logits, ours, saved

V37, TOKENS = Numbers(WORDS), random_tokens(3, 16, WORDS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "gpt2"


def loaded(url: object, vocabulary: Any = V37, **changes: int) -> GPT:
    model = ours(**changes)
    start_from(model, str(url), vocabulary, ALONE)
    return model


def test_the_logits_are_those_of_transformers_to_the_bit(folder: Path) -> None:
    """With the same kernel for the same activation, there is no difference at all; from several files, too."""
    theirs = saved(folder, activation_function="gelu_pytorch_tanh")
    assert torch.equal(logits(loaded(folder), TOKENS), logits(theirs, TOKENS))
    (folder / "model.safetensors").unlink()
    theirs.bfloat16().save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert torch.equal(logits(loaded(folder), TOKENS), logits(theirs.float(), TOKENS))


def test_published_checkpoints_leave_out_a_prefix_and_hold_masks_and_a_tied_head(folder: Path) -> None:
    saved(folder)
    expected = loaded(folder)

    def published(tensors: dict[str, Any]) -> dict[str, Any]:
        short = {name.removeprefix("transformer."): t for name, t in tensors.items()}
        masks = {f"h.{i}.attn.{n}": torch.ones(1, 1, 16, 16) for i in range(2) for n in ("bias", "masked_bias")}
        return short | masks | {"lm_head.weight": short["wte.weight"].clone()}

    change_weights(folder, published)
    change_config(folder, n_inner=None, scale_attn_weights=None, architectures=["GPT2Model"])
    assert all(torch.equal(a, b) for a, b in zip(loaded(folder).parameters(), expected.parameters(), strict=True))


def test_the_model_may_know_fewer_positions_and_its_embedding_or_theirs_may_be_padded(folder: Path) -> None:
    theirs = saved(folder, activation_function="gelu_pytorch_tanh")
    few = TOKENS[:, :5]
    assert torch.equal(logits(loaded(folder, block_size=5), few), logits(theirs, few))
    expected = logits(theirs, TOKENS)
    torch.testing.assert_close(logits(loaded(folder, vocab_multiple=64), TOKENS), expected, rtol=0, atol=1e-5)
    # 37 rows, the last two of them padding that came with the weights.
    there = loaded(folder, Numbers(35), vocab_size=35, vocab_multiple=37)
    assert torch.equal(logits(there, TOKENS), expected[..., :35])


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SPOILT_FILES: dict[str, dict[str, str | None]] = {  # None takes a file out
    "no config": {"config.json": None},
    "no JSON": {"config.json": "{"},
    "no weights": {WEIGHTS: None},
    "a pickle": {WEIGHTS: None, "pytorch_model.bin": "anything"},
    "damaged": {WEIGHTS: "anything"},
    "an empty index": {WEIGHTS: None, INDEX: "{}"},
    "another folder": {WEIGHTS: None, INDEX: '{"weight_map": {"a": "../x"}}'},
    "a file that is missing": {WEIGHTS: None, INDEX: '{"weight_map": {"a": "x.safetensors"}}'},
    "no name": {WEIGHTS: None, INDEX: '{"weight_map": {"a": "x\\u0000.safetensors"}}'},
    "a damaged tokenizer": {"tokenizer.json": "{"},
    "an odd tokenizer": {"tokenizer.json": '{"model": {"vocab": {}}, "added_tokens": [{"content": [1]}]}'},
}
SPOILT_CONFIGS: dict[str, dict[str, object]] = {
    "another model": {"model_type": "llama"},
    "another activation": {"activation_function": "relu"},
    "another epsilon": {"layer_norm_epsilon": 1e-6},
    "no number": {"n_layer": "two"},
}
SPOILT_WEIGHTS = {
    "one too many": {"x": torch.ones(1)},
    "turned": {"transformer.h.0.mlp.c_fc.weight": torch.ones(96, 24)},
    "not finite": {"transformer.wpe.weight": torch.full((16, 24), torch.nan).to(torch.float8_e5m2)},
    "another head": {"lm_head.weight": torch.ones(WORDS, 24)},
}


@pytest.mark.parametrize("how", [*SPOILT_FILES, *SPOILT_CONFIGS, *SPOILT_WEIGHTS])
def test_what_is_no_such_folder_is_a_mistake(folder: Path, how: str, told: Told) -> None:
    saved(folder)
    change_config(folder, **SPOILT_CONFIGS.get(how, {}))
    change_weights(folder, lambda tensors: tensors | SPOILT_WEIGHTS.get(how, {}))
    for name, content in SPOILT_FILES.get(how, {}).items():
        (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with pytest.raises(UserError) as mistake:
        loaded(folder)
    assert len(mistake.value.problems) == 1
    told(str(mistake.value), folder)


def test_all_differences_are_listed_with_what_to_set(folder: Path, told: Told) -> None:
    saved(folder)
    with told.mistake(folder):
        loaded(folder, Numbers(9), n_layer=3, n_embd=48, block_size=20, vocab_size=9)


def test_a_vocabulary_of_the_same_size_with_other_numbers_is_a_mistake(folder: Path) -> None:
    saved(folder, vocab_size=3)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(Characters("abc").to_json())))
    loaded(folder, Characters("abc"), vocab_size=3)
    with pytest.raises(UserError, match=r"'c' .*'d' "):
        loaded(folder, Characters("abd"), vocab_size=3)


@pytest.mark.parametrize("rows", [WORDS - 5, WORDS + 5])
def test_the_advice_for_weights_of_other_tokens_helps(folder: Path, rows: int) -> None:
    """Fewer rows than the vocabulary are never padding; more may be."""
    saved(folder, vocab_size=rows)
    with pytest.raises(UserError) as error:
        loaded(folder)
    message = str(error.value)
    assert "data.tokenizer=" in message
    padded = re.search(r"model\.vocab_multiple=(\d+)", message)
    assert (padded is not None) == (rows > WORDS)
    if padded:
        assert loaded(folder, vocab_multiple=int(padded[1])).config.padded_vocab_size == rows
