"""`mingpt export`: write a GPT as a folder that transformers and vLLM load, with its tokenizer."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from safetensors.torch import save as encode_safetensors

from mingpt.cli.console import say
from mingpt.config.datasets import CHATML, PLAIN
from mingpt.data.chat import end_of_answer, response_template, templates_of
from mingpt.data.source import TextVocabulary, Vocabulary
from mingpt.data.template import START, chatml
from mingpt.errors import UserError
from mingpt.files.folder import Folder
from mingpt.model.language import LanguageModel
from mingpt.weights.fitting import form_of
from mingpt.weights.reading import CONFIG, WEIGHTS
from mingpt.weights.tokens import MERGED, Fields, numbers_in, split, tokenizer_json

KEY = "FOLDER"
BORDER = "\ufdd0"  # no character: Unicode keeps it for a program's own use


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


def _json(fields: Fields) -> bytes:
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()


def _reads_apart(fields: Fields) -> bool:
    """Tell whether texts with a border between them get the tokens that they get alone."""
    from tokenizers import Tokenizer  # an optional package

    read = Tokenizer.from_str(json.dumps(fields)).encode
    bordered, alone = "", list[int]()
    # Spaces and line ends at the edges are what a tokenizer merges over a border.
    for text in ("User: \n", "Assistant:", " \n"):
        bordered += BORDER + text
        alone += read(text).ids
    return bool(read(bordered).ids == alone)


def tokenizer_files(vocabulary: Mapping[str, Any], end: int | None, chat: str) -> dict[str, Fields]:
    """The fields of the tokenizer's files by name, from a vocabulary's JSON; none if its tokens are not text.

    end: the token that ends a text. chat: the run's data.template, with which its files spell messages; "": none.
    """
    fields = tokenizer_json(vocabulary)
    if fields is None:
        return {}
    # Without this class transformers would use GPT-2's own tokenizer, because the model's type is gpt2.
    how: Fields = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    merged = vocabulary["kind"] in MERGED
    if end is not None:
        token = next(token for token, number in numbers_in(fields).items() if number == end)
        how |= {"eos_token": token} | ({"bos_token": token} if merged else {})
    if chat not in ("", PLAIN):
        how["chat_template"] = vocabulary.get("template") or chatml()
        if chat == CHATML and vocabulary.get("end"):
            how["response_template"] = response_template(f"{START}assistant\n", vocabulary["end"])
    elif chat and merged:  # in one piece, white space of two texts would merge: other tokens than in training
        inner = fields["pre_tokenizer"]
        both = [split({"String": BORDER}, "Removed"), *([inner] if inner else [])]
        fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}
        if _reads_apart(fields):
            how |= templates_of(token, BORDER)
        else:
            say("this tokenizer reads a text otherwise where another one precedes it: there is no chat_template for it")
    elif chat:
        how |= templates_of("\n", "")
    # A text that spells a special token gets the tokens of its letters, as in training; a template's end is that token.
    how["split_special_tokens"] = not (chat and merged)
    return {"tokenizer.json": fields, "tokenizer_config.json": how}


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
