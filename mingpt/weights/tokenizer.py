"""Write a vocabulary as the files of a Hugging Face tokenizer, and read the token numbers out of such files."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from mingpt.data.bpe import BYTE_OF_LETTER, END_OF_TEXT, GPT2Tokens

Files = dict[str, str]


def _tokenizer_json(model: Mapping[str, Any], pre_tokenizer: Mapping[str, Any], decoder: Mapping[str, Any]) -> Files:
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
    # Without this file transformers would use GPT-2's own tokenizer, because the model's type is gpt2.
    how = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {"tokenizer.json": _as_text(tokenizer), "tokenizer_config.json": _as_text(how)}


def _as_text(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


def _characters(vocabulary: Mapping[str, Any]) -> Files:
    """Word-level, with each character a word. The unknown token has no number, so an unknown character is an error."""
    ids = {c: i for i, c in enumerate(vocabulary["characters"])}
    return _tokenizer_json(
        {"type": "WordLevel", "vocab": ids, "unk_token": "<|unknown|>"},
        {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        {"type": "Fuse"},
    )


def _bytes(vocabulary: Mapping[str, Any]) -> Files:
    """Byte-level BPE that never merges; a token's number is its byte."""
    ids = dict(sorted(BYTE_OF_LETTER.items(), key=lambda item: item[1]))
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return _tokenizer_json({"type": "BPE", "vocab": ids, "merges": []}, level, level)


def _gpt2(vocabulary: Mapping[str, Any]) -> Files:
    """GPT-2's own two files: the merges as they are, and each token's number, which follows from them."""
    tokens = [*GPT2Tokens(vocabulary["merges"]).spelled(), END_OF_TEXT]
    numbers = {token: number for number, token in enumerate(tokens)}
    how = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "clean_up_tokenization_spaces": False}
    return {
        "merges.txt": vocabulary["merges"],
        "vocab.json": json.dumps(numbers, ensure_ascii=False),
        "tokenizer_config.json": _as_text(how),
    }


# By the `kind` in a vocabulary's JSON. Other kinds (images, sums) are not text and have no such files.
FILES: dict[str, Callable[[Mapping[str, Any]], Files]] = {
    "char": _characters,
    "byte": _bytes,
    "gpt2": _gpt2,
    "tokenizer.json": lambda vocabulary: {"tokenizer.json": vocabulary["text"]},
}


def tokenizer_files(vocabulary: Mapping[str, Any]) -> Files:
    """The tokenizer's files by name, from a vocabulary's JSON; none if its tokens are not text."""
    make = FILES.get(vocabulary["kind"])
    return make(vocabulary) if make else {}


def numbers_in(files: Mapping[str, str]) -> dict[str, int] | None:
    """Each token's number in tokenizer files; None if they don't say. Raises ValueError if a file is damaged."""
    if "vocab.json" in files:
        numbers = json.loads(files["vocab.json"])
    elif "tokenizer.json" in files:
        tokenizer = json.loads(files["tokenizer.json"])
        model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
        numbers = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(numbers, dict):
            numbers = numbers | _added(tokenizer.get("added_tokens") or [])
    else:
        return None
    return numbers if isinstance(numbers, dict) else None


def _added(tokens: object) -> dict[str, int]:
    """The numbers of tokenizer.json's added_tokens. Raises ValueError if they are malformed."""
    if not isinstance(tokens, list):
        raise ValueError("added_tokens is not a list")
    known = [t for t in tokens if isinstance(t, dict) and {"content", "id"} <= t.keys()]
    if not all(isinstance(t["content"], str) for t in known):
        raise ValueError("added_tokens has an entry whose content is not text")
    return {t["content"]: t["id"] for t in known}
