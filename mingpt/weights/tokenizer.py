"""A vocabulary as the files of a Hugging Face tokenizer, which spell conversations as the run's template does."""

import json
from collections.abc import Mapping
from typing import Any

from mingpt.cli.console import say
from mingpt.config.datasets import CHATML, PLAIN
from mingpt.data.chat import response_template, templates_of
from mingpt.data.template import START, chatml
from mingpt.weights.tokens import MERGED, Fields, numbers_in, split, tokenizer_json

BORDER = "\ufdd0"  # no character: Unicode keeps it for a program's own use


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


def tokenizer_files(vocabulary: Mapping[str, Any], end: int | None = None, chat: str = "") -> dict[str, Fields]:
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
