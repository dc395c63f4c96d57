"""A vocabulary as the fields of a Hugging Face tokenizer.json, and the token numbers in such fields."""

import json
from collections.abc import Mapping
from typing import Any

from mingpt.data.bpe import BYTE_LEVEL, BYTE_OF_LETTER, Encoder
from mingpt.data.vocabulary import vocabulary_of

Fields = dict[str, Any]
MERGED = ("gpt2", "tokenizer.json")  # kinds of vocabularies whose bytes were merged in pairs


def _tokenizer_json(model: Fields, pre_tokenizer: Fields, decoder: Fields) -> Fields:
    return {
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


def split(pattern: Fields, behavior: str) -> Fields:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}


def tokenizer_json(vocabulary: Mapping[str, Any]) -> Fields | None:
    """A tokenizer.json's fields, from a vocabulary's JSON; None if its tokens are not text."""
    match vocabulary["kind"]:
        case "char":
            # Word-level, with each character a word. The unknown token has no number, so an unknown character is an
            # error.
            ids = {c: i for i, c in enumerate(vocabulary["characters"])}
            model = {"type": "WordLevel", "vocab": ids, "unk_token": "<|unknown|>"}
            return _tokenizer_json(model, split({"Regex": r"[\s\S]"}, "Isolated"), {"type": "Fuse"})
        case "byte":
            # Byte-level BPE that never merges; a token's number is its byte.
            ids = dict(sorted(BYTE_OF_LETTER.items(), key=lambda item: item[1]))
            level = BYTE_LEVEL | {"use_regex": False}
            return _tokenizer_json({"type": "BPE", "vocab": ids, "merges": []}, level, level)
        case kind if kind in MERGED:
            encoder = vocabulary_of(dict(vocabulary))
            assert isinstance(encoder, Encoder)
            fields: Fields = json.loads(encoder.file)
            # Without what the file's owner has it add, cut or fill up, which training did not.
            return fields | {"truncation": None, "padding": None, "post_processor": None}
    return None


def numbers_in(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Each token's number in a tokenizer.json. Raises KeyError, TypeError or AttributeError if it is damaged."""
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    return dict(tokenizer["model"]["vocab"]) | added
