"""The modern model and transformers: the same logits, there and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from mingpt.config.models import ModernModel
from mingpt.data.vocabulary import Numbers
from mingpt.model.modern import Modern, ModernConfig
from mingpt.weights.reading import start_from
from mingpt.weights.writing import folder_of, write_folder
from tests.kits.model_kit import random_tokens, vivid
from tests.kits.snapshot_kit import ALONE
from tests.kits.told import Told
from tests.kits.weights_kit import WORDS, change_config, logits

SIZES = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "head_dim": 10, "n_embd": 24, "n_inner": 40, "block_size": 16}
THEIRS: dict[str, Any] = {
    "vocab_size": WORDS, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 16, "rms_norm_eps": 1e-6,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TOKENS = random_tokens(3, 16, WORDS)
# Llama 3.1's, after a training with 32 positions: of a head's five wavelengths some stay, and some are stretched.
ROPE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {"rope_factor": 4.0, "rope_original": 32}
QWEN2 = {key: value for key, value in THEIRS.items() if key != "head_dim"} | {"hidden_size": 40}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Qwen3": (Qwen3Config(**THEIRS), {}),
    "Qwen2": (Qwen2Config(**QWEN2), {"qk_norm": False, "qkv_bias": True, "n_embd": 40}),
    "Llama 3.1": (LlamaConfig(**THEIRS, rope_parameters=ROPE), {"qk_norm": False, **LLAMA3}),
    "SmolLM": (LlamaConfig(**THEIRS, tie_word_embeddings=True), {"qk_norm": False, "tied": True}),
}


def ours(**changes: Any) -> Modern:
    torch.manual_seed(5)
    return Modern(ModernConfig.of(ModernModel.model_validate(SIZES | changes), WORDS)).eval()


def apart(a: Any, b: Any) -> float:
    """The largest difference of logits in fp32, as a part of the largest logit, which is about 5."""
    a, b = logits(a, TOKENS), logits(b, TOKENS)
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_opens_an_export_and_a_run_starts_from_their_weights(tmp_path: Path, family: str) -> None:
    config, also = FAMILIES[family]
    shape = also | {"vocab_multiple": 8, "rope_base": 500.0}
    model, again = vivid(ours(**shape)), ours(**shape)
    write_folder(str(tmp_path), files := folder_of(model, Numbers(WORDS)), overwrite=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert theirs.config.model_type == config.model_type
    start_from(again, str(tmp_path), Numbers(WORDS), ALONE)
    for other in (theirs, again):
        assert apart(other, model) < 2e-6
    assert json.loads(files["config.json"])["rope_theta"] == 500  # where other tools look for it
    theirs, model = vivid(AutoModelForCausalLM.from_config(config)), ours(**also)
    theirs.save_pretrained(tmp_path / "theirs")
    start_from(model, str(tmp_path / "theirs"), Numbers(WORDS), ALONE)
    assert apart(theirs, model) < 2e-6


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, {"n_inner": 8}),
        ({}, {"rope_base": 7.0}),
        ({"rms_norm_eps": 1e-5}, {}),
        ({}, {"tied": True}),
        ({}, {"block_size": 17}),
        ({}, {"qk_norm": False}),
        ({"hidden_act": "relu"}, {}),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}}, {}),
        ({"rope_parameters": ROPE}, {}),
        ({"rope_parameters": None, "rope_scaling": ROPE | {"high_freq_factor": 8.0}}, LLAMA3),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], told: Told) -> None:
    AutoModelForCausalLM.from_config(Qwen3Config(**THEIRS)).save_pretrained(tmp_path)
    change_config(tmp_path, **fields)
    with told.mistake(tmp_path):
        start_from(ours(**changes), str(tmp_path), Numbers(WORDS), ALONE)
