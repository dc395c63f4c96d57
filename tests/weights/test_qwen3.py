"""The modern model and transformers: the same logits, there and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mingpt.data.vocabulary import Numbers
from mingpt.errors import UserError
from mingpt.model.modern import Modern, ModernModel
from mingpt.weights.reading import start_from
from mingpt.weights.writing import folder_of, write_folder
from told import Told
from weights_kit import ALONE, change_config

SIZES = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "head_dim": 10, "n_embd": 24, "n_inner": 40, "block_size": 16}
THEIRS: dict[str, Any] = {
    "vocab_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 16, "rms_norm_eps": 1e-6,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TOKENS = torch.randint(37, (3, 16), generator=torch.Generator().manual_seed(2))


def vivid(model: nn.Module) -> Any:
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def ours(**changes: Any) -> Modern:
    torch.manual_seed(5)
    return Modern(ModernModel.model_validate(SIZES | changes).shape(37)).eval()


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.logits(TOKENS) if isinstance(model, Modern) else model(TOKENS).logits


@pytest.mark.parametrize(("qk_norm", "tied"), [(True, True), (False, False)])
def test_transformers_opens_an_export(tmp_path: Path, qk_norm: bool, tied: bool) -> None:
    model = vivid(ours(qk_norm=qk_norm, tied=tied, vocab_multiple=8, rope_base=500.0))
    write_folder(str(tmp_path), folder_of(model, Numbers(37)), overwrite=False)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(theirs) is (Qwen3ForCausalLM if qk_norm else LlamaForCausalLM)
    assert (logits(theirs) - logits(model)).abs().max() < 1e-5
    again = ours(qk_norm=qk_norm, tied=tied, vocab_multiple=8, rope_base=500.0)
    start_from(again, str(tmp_path), Numbers(37), ALONE)
    for name, tensor in again.state_dict().items():  # but for the padding, which an export leaves out
        rows = 37 if len(tensor) == 40 and name.endswith(("embed_tokens.weight", "lm_head.weight")) else len(tensor)
        assert torch.equal(tensor[:rows], model.state_dict()[name][:rows]), name


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_run_starts_from_their_weights(tmp_path: Path, qk_norm: bool) -> None:
    theirs = vivid(Qwen3ForCausalLM(Qwen3Config(**THEIRS)) if qk_norm else LlamaForCausalLM(LlamaConfig(**THEIRS)))
    theirs.save_pretrained(tmp_path)
    model = ours(qk_norm=qk_norm)
    start_from(model, str(tmp_path), Numbers(37), ALONE)
    assert (logits(theirs) - logits(model)).abs().max() < 1e-5


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
        start_from(ours(**changes), str(tmp_path), Numbers(37), ALONE)
    told(str(refused.value), tmp_path)


def test_padding_that_is_no_power_of_two(tmp_path: Path) -> None:
    Qwen3ForCausalLM(Qwen3Config(**THEIRS | {"vocab_size": 601})).save_pretrained(tmp_path)
    torch.manual_seed(5)
    kind = ModernModel.model_validate(SIZES)
    with pytest.raises(UserError, match=r"model\.vocab_multiple=601"):
        start_from(Modern(kind.shape(597)), str(tmp_path), Numbers(597), ALONE)
    fitting = Modern(kind.model_copy(update={"vocab_multiple": 601}).shape(597))
    start_from(fitting, str(tmp_path), Numbers(597), ALONE)


def test_other_tools_find_the_base_of_the_positions_where_they_look(tmp_path: Path) -> None:
    fields = json.loads(folder_of(ours(rope_base=500.0), Numbers(37))["config.json"])
    assert (fields["rope_theta"], fields["rope_parameters"]["rope_theta"]) == (500.0, 500.0)
    assert "mlp_bias" not in fields
