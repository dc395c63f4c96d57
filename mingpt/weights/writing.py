"""`mingpt export`: write a GPT as a folder that transformers loads, with its tokenizer."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save as encode_safetensors

from mingpt.atomic import write_whole
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
    """The config.json of transformers' GPT2Config. end_of_text: the token's number, if there is one."""
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
        # The same function as gelu_new. Under this name transformers uses torch's kernel, as we do, so that the logits
        # are bit-equal.
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
    """The files by name, the weights last. Leaves out the embedding's padding rows, which no token uses."""
    end_of_text: int | None = None
    with suppress(UserError):  # its tokenizer.json has no such token
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
    """Write each file atomically. Raises UserError if one exists, unless `overwrite`."""
    fs, path = open_fs(url, KEY)
    shown, path = without_secrets(url), path.rstrip("/")
    with place(KEY, url):
        if is_local(fs) and os.path.exists(path) and not os.path.isdir(path):
            raise UserError(f"{KEY}={shown} is a file: name a folder")
        if there := [name for name in files if not overwrite and fs.exists(f"{path}/{name}")]:
            raise UserError(f"{KEY}={shown} has {', '.join(there)} already: choose another folder, or add --overwrite")
        for name, content in files.items():
            if is_local(fs):
                write_whole(Path(path, name), [content])
            else:
                fs.pipe_file(f"{path}/{name}", content)
