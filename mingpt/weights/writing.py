"""`mingpt export`: a snapshot's GPT as a folder that transformers loads, tokenizer included."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors.torch import save as encode_safetensors

from mingpt.data.vocabulary import Vocabulary
from mingpt.errors import UserError
from mingpt.model.gpt2 import GPT
from mingpt.redact import without_secrets
from mingpt.storage import is_local, open_fs, place
from mingpt.weights.fitting import EMBEDDING
from mingpt.weights.reading import CONFIG, WEIGHTS
from mingpt.weights.tokenizer import tokenizer_files

KEY = "FOLDER"


def config_json(gpt: GPT, end_of_text: int | None) -> dict[str, Any]:
    """GPT-2's config as transformers reads it."""
    c = gpt.config
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": c.vocab_size,
        "n_positions": c.block_size,
        "n_ctx": c.block_size,
        "n_embd": c.n_embd,
        "n_layer": c.n_layer,
        "n_head": c.n_head,
        "n_inner": None,
        # GPT-2's own, which transformers also knows as gelu_new; by this name it computes it with torch's kernel, as we
        # do, and the logits are equal to the bit.
        "activation_function": "gelu_pytorch_tanh",
        "resid_pdrop": c.dropout,
        "embd_pdrop": c.dropout,
        "attn_pdrop": c.dropout,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }


def folder_of(gpt: GPT, vocabulary: Vocabulary) -> dict[str, bytes]:
    """The files by name, the weights last. The embedding's padding stays behind: no token uses it."""
    end_of_text: int | None = None
    with suppress(UserError):  # a tokenizer.json that has no such token
        end_of_text = getattr(vocabulary, "end_of_text", None)
    tensors = {name: tensor.contiguous() for name, tensor in gpt.state_dict().items()}
    tensors[EMBEDDING] = tensors[EMBEDDING][: gpt.config.vocab_size].contiguous()
    generation = {"bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": end_of_text}
    files = {name: text.encode() for name, text in tokenizer_files(vocabulary.to_json()).items()}
    files["generation_config.json"] = _json({k: v for k, v in generation.items() if v is not None})
    files[CONFIG] = _json(config_json(gpt, end_of_text))
    files[WEIGHTS] = encode_safetensors(tensors, metadata={"format": "pt"})
    return files


def _json(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


def write_folder(url: str, files: dict[str, bytes], overwrite: bool) -> None:
    """Each file whole or not at all. Raises UserError if one is there already, unless it may be overwritten."""
    fs, path = open_fs(url, KEY)
    shown, path = without_secrets(url), path.rstrip("/")
    with place(KEY, url):
        if is_local(fs) and os.path.exists(path) and not os.path.isdir(path):
            raise UserError(f"{KEY}={shown} is a file: name a folder")
        if there := [name for name in files if not overwrite and fs.exists(f"{path}/{name}")]:
            raise UserError(f"{KEY}={shown} has {', '.join(there)} already: choose another folder, or say --overwrite")
        if is_local(fs):
            Path(path).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            if is_local(fs):
                temporary = Path(path, f".{name}.{uuid4().hex}.tmp")
                try:
                    temporary.write_bytes(content)
                    temporary.replace(Path(path, name))
                finally:
                    temporary.unlink(missing_ok=True)
            else:
                fs.pipe_file(f"{path}/{name}", content)
