"""Write a vocabulary as the files of a Hugging Face tokenizer, and read the token numbers out of such files."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from mingpt.cli.console import say
from mingpt.config.datasets import CHATML, PLAIN
from mingpt.data.bpe import BYTE_LEVEL, BYTE_OF_LETTER, Encoder
from mingpt.data.chat import response_template, templates_of
from mingpt.data.template import START, chatml
from mingpt.data.vocabulary import vocabulary_of

Fields = dict[str, Any]
Files = dict[str, str]
BORDER = "\ufdd0"  # no character: Unicode keeps it for a program's own use


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


def _as_text(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


def _split(pattern: Fields, behavior: str) -> Fields:
    return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}


def _characters(vocabulary: Mapping[str, Any]) -> Fields:
    """Word-level, with each character a word. The unknown token has no number, so an unknown character is an error."""
    ids = {c: i for i, c in enumerate(vocabulary["characters"])}
    model = {"type": "WordLevel", "vocab": ids, "unk_token": "<|unknown|>"}
    return _tokenizer_json(model, _split({"Regex": r"[\s\S]"}, "Isolated"), {"type": "Fuse"})


def _bytes(vocabulary: Mapping[str, Any]) -> Fields:
    """Byte-level BPE that never merges; a token's number is its byte."""
    ids = dict(sorted(BYTE_OF_LETTER.items(), key=lambda item: item[1]))
    level = BYTE_LEVEL | {"use_regex": False}
    return _tokenizer_json({"type": "BPE", "vocab": ids, "merges": []}, level, level)


def _merged(vocabulary: Mapping[str, Any]) -> Fields:
    """Byte pairs merged as in training."""
    encoder = vocabulary_of(dict(vocabulary))
    assert isinstance(encoder, Encoder)
    fields: Fields = json.loads(encoder.file)
    # Without what the file's owner has it add, cut or fill up, which training did not.
    return fields | {"truncation": None, "padding": None, "post_processor": None}


# By the `kind` in a vocabulary's JSON. Other kinds (sums) are not text and have no such files.
KINDS: dict[str, Callable[[Mapping[str, Any]], Fields]] = {
    "char": _characters,
    "byte": _bytes,
    "gpt2": _merged,
    "tokenizer.json": _merged,
}


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


def tokenizer_files(vocabulary: Mapping[str, Any], end: int | None = None, chat: str = "") -> Files:
    """The tokenizer's files by name, from a vocabulary's JSON; none if its tokens are not text.

    end: the token that ends a text. chat: the run's data.template, with which its files spell messages; "": none.
    """
    make = KINDS.get(vocabulary["kind"])
    if make is None:
        return {}
    fields = make(vocabulary)
    # Without this class transformers would use GPT-2's own tokenizer, because the model's type is gpt2.
    how: Fields = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    merged = make is _merged
    if end is not None:
        token = next(token for token, number in numbers_in(fields).items() if number == end)
        how |= {"eos_token": token} | ({"bos_token": token} if merged else {})
    if chat not in ("", PLAIN):
        how["chat_template"] = vocabulary.get("template") or chatml()
        if chat == CHATML and vocabulary.get("end"):
            how["response_template"] = response_template(f"{START}assistant\n", vocabulary["end"])
    elif chat and merged:  # in one piece, white space of two texts would merge: other tokens than in training
        inner = fields["pre_tokenizer"]
        both = [_split({"String": BORDER}, "Removed"), *([inner] if inner else [])]
        fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}
        if _reads_apart(fields):
            how |= templates_of(token, BORDER)
        else:
            say("this tokenizer reads a text otherwise where another one precedes it: there is no chat_template for it")
    elif chat:
        how |= templates_of("\n", "")
    # A text that spells a special token gets the tokens of its letters, as in training; a template's end is that token.
    how["split_special_tokens"] = not (chat and merged)
    return {"tokenizer.json": _as_text(fields), "tokenizer_config.json": _as_text(how)}


def numbers_in(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Each token's number in a tokenizer.json. Raises KeyError, TypeError or AttributeError if it is damaged."""
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}
    return dict(tokenizer["model"]["vocab"]) | added
