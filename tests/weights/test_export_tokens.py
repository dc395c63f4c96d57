"""The exported tokenizer and chat template give transformers the tokens that the run was trained on."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

import bpe_kit
from mingpt.data.bpe import HuggingFaceTokens
from mingpt.data.chat import end_of_answer, turns_of
from mingpt.data.vocabulary import Bytes, Characters, TextVocabulary
from mingpt.model.gpt2 import GPT
from mingpt.weights.writing import folder_of, write_folder
from weights_kit import ours, shape

ODD = (
    " the king in woe!\n  1", "a \n\n b\r\n\tc   ", "é e\u0301 漢字 ﷽ Ċ Ġ",
    "🙂🏽‍👩‍👧 \u200b\u00a0\u2028x", "<|endoftext|> </s>",
    "it's 12,345.678 … I'LL", "\x00\x1f\x7f", "\n", " ", "ﬁ Ǆ ß ſ İ",
)  # fmt: skip
# White space where one text ends and the next begins: encoded in one piece it would have other tokens.
CHATS = (
    [("user", "the king?")],
    [("system", "Be long. \n"), ("user", " woe \n\n"), ("assistant", "the\n1"), ("user", "\n")],
    [("user", "é 漢"), ("assistant", "  lo "), ("assistant", "lon"), ("user", "User: "), ("system", "")],
)


def vocabularies(folder: Path) -> dict[str, TextVocabulary]:
    texts = [*ODD, "User: Assistant:", *(text for chat in CHATS for _, text in chat)]
    return {
        "char": Characters("".join(sorted({*"".join(texts)}))),
        "byte": Bytes(),
        "gpt2": bpe_kit.small(),
        "tokenizer.json": HuggingFaceTokens(bpe_kit.write_tokenizer(folder).read_text()),
        "sentences": HuggingFaceTokens(sentences()),
    }


def sentences() -> str:
    """A tokenizer in SentencePiece's manner, which begins each text with a blank of its own, and each row with <s>."""
    letters = sorted({*"".join(ODD), *"UserAistn:é漢?.\nlo"} - {" "})
    pieces = ["<unk>", "<s>", "</s>", "▁", *letters, "▁l", "▁lo", "lo"]
    vocab, merges = {p: i for i, p in enumerate(pieces)}, [["▁", "l"], ["▁l", "o"], ["l", "o"]]
    tokenizer: dict[str, Any] = json.loads(Tokenizer(models.BPE()).to_str())
    tokenizer["model"] |= {"vocab": vocab, "merges": merges, "unk_token": "<unk>"}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] = [{"id": i, "content": pieces[i], **flags, "special": True} for i in range(3)]
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, blanks]}
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [begin],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }  # fmt: skip
    return json.dumps(tokenizer)


def exported(folder: Path, vocabulary: TextVocabulary, chat: bool) -> Any:
    model: GPT = ours(shape(vocab_size=vocabulary.size))
    write_folder(str(folder), folder_of(model, vocabulary, chat), overwrite=False)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["char", "byte", "gpt2", "tokenizer.json", "sentences"])
@pytest.mark.parametrize("chat", [False, True])
def test_texts_have_the_numbers_of_the_run(tmp_path: Path, kind: str, chat: bool) -> None:
    vocabulary = vocabularies(tmp_path)[kind]
    theirs = exported(tmp_path / "out", vocabulary, chat)
    for text in ODD:
        if not (chat and "<|" in text and kind not in ("char", "byte")):  # there it is the end of a text
            assert theirs(text)["input_ids"] == vocabulary.encode(text), text
            assert theirs.decode(vocabulary.encode(text)) == vocabulary.decode(vocabulary.encode(text)), text


@pytest.mark.parametrize("kind", ["char", "byte", "gpt2", "tokenizer.json"])
def test_conversations_have_the_numbers_of_training(tmp_path: Path, kind: str) -> None:
    vocabulary = vocabularies(tmp_path)[kind]
    theirs = exported(tmp_path / "out", vocabulary, chat=True)
    end = end_of_answer(vocabulary)
    assert theirs.eos_token_id == end
    for chat in CHATS:
        messages = [{"role": role, "content": text} for role, text in chat]
        turns = turns_of({"messages": [*messages, {"role": "assistant", "content": "1"}]})
        ids = [t for text, answer in turns[:-1] for t in [*vocabulary.encode(text), *([end] if answer else [])]]
        asked = theirs.apply_chat_template(messages, add_generation_prompt=True)
        assert asked["input_ids"] == ids, chat


def test_a_tokenizer_that_begins_each_text_with_a_blank_gets_no_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = exported(tmp_path / "out", vocabularies(tmp_path)["sentences"], chat=True)
    assert theirs.chat_template is None
    assert "chat_template" in capsys.readouterr().out


def test_a_role_that_no_run_knows_is_refused(tmp_path: Path) -> None:
    theirs = exported(tmp_path, Bytes(), chat=True)
    with pytest.raises(Exception, match="a message needs a role"):
        theirs.apply_chat_template([{"role": "tool", "content": "x"}])
