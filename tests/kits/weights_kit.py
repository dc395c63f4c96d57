"""GPT-2s of transformers itself, small, seeded and vivid: at GPT-2's 0.02 most paths hardly show in the logits."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from mingpt.model.gpt2 import GPT, GPTConfig
from mingpt.world.world import World

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), backend="gloo")
SIZES = {"vocab_size": 37, "n_positions": 16, "n_layer": 2, "n_head": 2, "n_embd": 24}


def hugging_face(seed: int = 1, **settings: Any) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    settings = SIZES | {"bos_token_id": None, "eos_token_id": None} | settings
    model = GPT2LMHeadModel(GPT2Config(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def saved(folder: Path, seed: int = 1, **settings: Any) -> GPT2LMHeadModel:
    model = hugging_face(seed, **settings)
    model.save_pretrained(folder)
    return model


def shape(**changes: int) -> GPTConfig:
    """Ours, of the same sizes."""
    sizes = {"vocab_size": 37, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 24} | changes
    return GPTConfig(**sizes)


def ours(config: GPTConfig, seed: int = 5) -> GPT:
    torch.manual_seed(seed)
    return GPT(config).eval()


def logits(model: GPT | GPT2LMHeadModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.logits(tokens) if isinstance(model, GPT) else model(tokens).logits


def tokens(size: int = 37, time: int = 16) -> Tensor:
    return torch.randint(size, (3, time), generator=torch.Generator().manual_seed(2))


def change_config(folder: Path, **fields: Any) -> None:
    """A value of None takes the key out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def change_weights(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = change(load_file(path))
    path.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
