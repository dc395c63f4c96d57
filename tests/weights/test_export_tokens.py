"""The exported tokenizer gives transformers the tokens that the run was trained on. (Chats: data/test_template.py.)"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from mingpt.data.bpe import HuggingFaceTokens
from mingpt.data.source import TextVocabulary
from mingpt.data.vocabulary import Bytes, Characters
from mingpt.weights.writing import folder_of, write_folder
from tests.kits import bpe_kit
from tests.kits.weights_kit import ours

ODD = (
    " the king in woe!\n  1", "a \n\n b\r\n\tc   ", "é e\u0301 漢字 ﷽ Ċ Ġ",
    "🙂🏽‍👩‍👧 \u200b\u00a0\u2028x", "<|endoftext|> </s>",
    "it's 12,345.678 … I'LL", "\x00\x1f\x7f", "\n", " ", "ﬁ Ǆ ß ſ İ",
)  # fmt: skip


def vocabularies(folder: Path) -> dict[str, TextVocabulary]:
    tokenizer = bpe_kit.write_tokenizer(folder).read_text()
    return {
        "char": Characters("".join(sorted({*"".join([*ODD, "User: Assistant:"])}))),
        "byte": Bytes(),
        "gpt2": bpe_kit.small(),
        "tokenizer.json": HuggingFaceTokens(tokenizer),
        "sentences": HuggingFaceTokens(sentences(tokenizer)),
    }


def sentences(tokenizer: str) -> str:
    """In SentencePiece's manner it begins each text with a blank of its own, and each row with a token."""
    fields = json.loads(tokenizer)
    content, number = (fields["added_tokens"][0][key] for key in ("content", "id"))
    begin = {"SpecialToken": {"id": content, "type_id": 0}}
    fields["normalizer"] = {"type": "Prepend", "prepend": " "}
    fields["post_processor"] = {
        "type": "TemplateProcessing", "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [begin],
        "special_tokens": {content: {"id": content, "ids": [number], "tokens": [content]}},
    }  # fmt: skip
    return json.dumps(fields)


@pytest.mark.parametrize("kind", ["char", "byte", "gpt2", "tokenizer.json", "sentences"])
@pytest.mark.parametrize("chat", ["", "plain"])
def test_texts_have_the_numbers_of_the_run(tmp_path: Path, kind: str, chat: str) -> None:
    vocabulary = vocabularies(tmp_path)[kind]
    files = folder_of(ours(vocab_size=vocabulary.size), vocabulary, chat)
    write_folder(str(tmp_path / "out"), files, overwrite=False)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ODD:
        if not (chat and "<|" in text and kind not in ("char", "byte")):  # there it is the end of a text
            assert theirs(text)["input_ids"] == vocabulary.encode(text), text
            assert theirs.decode(vocabulary.encode(text)) == vocabulary.decode(vocabulary.encode(text)), text
    # One that begins each text with a blank of its own can't spell conversations.
    assert bool(theirs.chat_template) == (chat != "" and kind != "sentences")
    if kind == "char":
        with pytest.raises(Exception, match="UNK"):  # the model never saw it
            theirs("the Ж")
