"""GPT-2s of transformers itself, small, seeded and vivid, and ours of their sizes."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.model.language import LanguageModel
from tests.kits.model_kit import vivid

WORDS = 37
SIZES = {"vocab_size": WORDS, "n_layer": 2, "n_head": 2, "n_embd": 24}


def saved(folder: Path, **settings: Any) -> GPT2LMHeadModel:
    """Write weights of transformers' own GPT-2 to a folder. settings: of its GPT2Config."""
    torch.manual_seed(1)
    settings = SIZES | {"n_positions": 16, "bos_token_id": None, "eos_token_id": None} | settings
    model = vivid(GPT2LMHeadModel(GPT2Config(**settings)))
    model.save_pretrained(folder)
    return model


def ours(**changes: int) -> GPT:
    """Ours, of the same sizes."""
    torch.manual_seed(5)
    return GPT(GPTConfig(**SIZES | {"block_size": 16} | changes)).eval()


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """What a model of ours or of transformers' says."""
    with torch.no_grad():
        return model.logits(tokens) if isinstance(model, LanguageModel) else model(tokens).logits


def change_config(folder: Path, **fields: Any) -> None:
    """A value of None takes the key out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def change_weights(folder: Path, change: Any) -> None:
    """Write the weights anew. change: from a dict of tensors to another one."""
    path = folder / "model.safetensors"
    tensors = change(load_file(path))
    path.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
