"""`mingpt export`: write a GPT as a folder that transformers and vLLM load, with its tokenizer."""

import json
import os
from contextlib import suppress
from typing import Any

from safetensors.torch import save as encode_safetensors

from mingpt.config.datasets import PLAIN
from mingpt.data.chat import end_of_answer
from mingpt.data.source import TextVocabulary, Vocabulary
from mingpt.errors import UserError
from mingpt.files.folder import Folder
from mingpt.model.language import LanguageModel
from mingpt.weights.fitting import form_of
from mingpt.weights.reading import CONFIG, WEIGHTS
from mingpt.weights.tokenizer import tokenizer_files

KEY = "FOLDER"


def folder_of(model: LanguageModel, vocabulary: Vocabulary, chat: str = "") -> dict[str, bytes]:
    """The files by name, the weights last. Leaves out the embedding's padding rows, which no token uses.

    chat: the data.template of a run that was trained on conversations.
    """
    end: int | None = None
    if chat == PLAIN and isinstance(vocabulary, TextVocabulary):
        end = end_of_answer(vocabulary)
    else:
        with suppress(UserError):  # its tokenizer.json has no such token; in ChatML, letters have none
            end = getattr(vocabulary, "end_of_text", None)
    form = form_of(model)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for name in {form.embedding, form.head} & tensors.keys():
        tensors[name] = tensors[name][: model.config.vocab_size].contiguous()
    special = {"bos_token_id": end, "eos_token_id": end}
    # Without do_sample a server would take no temperature; without top_k transformers would take 50.
    generation = {"do_sample": True, "top_k": 0, **special, "pad_token_id": end}
    files = {name: _json(fields) for name, fields in tokenizer_files(vocabulary.to_json(), end, chat).items()}
    files["generation_config.json"] = _json({k: v for k, v in generation.items() if v is not None})
    files[CONFIG] = _json(form.config_json() | special)
    files[WEIGHTS] = encode_safetensors(tensors, metadata={"format": "pt"})
    return files


def _json(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


def write_folder(url: str, files: dict[str, bytes], overwrite: bool) -> None:
    """Write each file atomically. Raises UserError if one exists, unless `overwrite`."""
    folder = Folder(url, KEY)
    with folder.named_errors():
        if folder.local and os.path.exists(folder.root) and not os.path.isdir(folder.root):
            raise UserError(f"{folder.shown} is a file: name a folder")
        existing = [] if overwrite else [name for name in files if folder.fs.exists(folder.path(name))]
    if existing:
        raise UserError(f"{folder.shown} has {', '.join(existing)} already: choose another folder, or add --overwrite")
    # The weights last: a folder that was cut off has none, and is taken for no model.
    for name, content in files.items():
        folder.write(name, content)
