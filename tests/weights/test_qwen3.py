"""The modern model and transformers: the same logits, there and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mingpt.data.vocabulary import Numbers
from mingpt.errors import UserError
from mingpt.model.modern import Modern, ModernModel
from mingpt.weights.reading import start_from
from mingpt.weights.writing import folder_of, write_folder
from model_kit import random_tokens, vivid
from snapshot_kit import ALONE
from told import Told
from weights_kit import WORDS, change_config, logits

SIZES = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "head_dim": 10, "n_embd": 24, "n_inner": 40, "block_size": 16}
THEIRS: dict[str, Any] = {
    "vocab_size": WORDS, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 16, "rms_norm_eps": 1e-6,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TOKENS = random_tokens(3, 16, WORDS)


def ours(**changes: Any) -> Modern:
    torch.manual_seed(5)
    return Modern(ModernModel.model_validate(SIZES | changes).shape(WORDS)).eval()


@pytest.mark.parametrize(("qk_norm", "tied"), [(True, True), (False, False)])
def test_transformers_opens_an_export(tmp_path: Path, qk_norm: bool, tied: bool) -> None:
    shape = {"qk_norm": qk_norm, "tied": tied, "vocab_multiple": 8, "rope_base": 500.0}
    model, again = vivid(ours(**shape)), ours(**shape)
    write_folder(str(tmp_path), files := folder_of(model, Numbers(WORDS)), overwrite=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs) is (Qwen3ForCausalLM if qk_norm else LlamaForCausalLM)
    start_from(again, str(tmp_path), Numbers(WORDS), ALONE)
    for other in (theirs, again):
        torch.testing.assert_close(logits(other, TOKENS), logits(model, TOKENS), rtol=0, atol=1e-5)
    assert json.loads(files["config.json"])["rope_theta"] == 500  # where other tools look for it


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_run_starts_from_their_weights(tmp_path: Path, qk_norm: bool) -> None:
    theirs = vivid(Qwen3ForCausalLM(Qwen3Config(**THEIRS)) if qk_norm else LlamaForCausalLM(LlamaConfig(**THEIRS)))
    theirs.save_pretrained(tmp_path)
    model = ours(qk_norm=qk_norm)
    start_from(model, str(tmp_path), Numbers(WORDS), ALONE)
    torch.testing.assert_close(logits(theirs, TOKENS), logits(model, TOKENS), rtol=0, atol=1e-5)


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
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, fields: dict[str, Any], changes: dict[str, Any], told: Told) -> None:
    Qwen3ForCausalLM(Qwen3Config(**THEIRS)).save_pretrained(tmp_path)
    change_config(tmp_path, **fields)
    with pytest.raises(UserError) as refused:
        start_from(ours(**changes), str(tmp_path), Numbers(WORDS), ALONE)
    told(str(refused.value), tmp_path)
