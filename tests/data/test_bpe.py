"""mingpt.data.bpe: GPT-2's tokens from its own files or a tokenizer.json, and what a snapshot gives back of them."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mingpt.cli import cli
from mingpt.config.datasets import TextData
from mingpt.data import bpe
from mingpt.data.bpe import END_OF_TEXT, pieces, read_tokenizer
from mingpt.data.opening import open_data
from mingpt.data.source import TextVocabulary
from mingpt.data.vocabulary import Characters, vocabulary_of
from mingpt.errors import UserError
from mingpt.weights.tokens import tokenizer_json
from tests.kits import bpe_kit
from tests.kits.paths_kit import ROOT

SENTENCES = [
    "the king!",
    " the king",
    "woe  woe\n\n\nlong 1234 live's",
    "größer – 漢字 🙂",
    "a\r\n \tb",
    "",
    "\x00\x1c x",
]


def test_both_forms_give_the_same_tokens_and_spell_the_text_again(tmp_path: Path) -> None:
    """Though the tokenizer.json says to cut and to pad; and from a snapshot, with no file at hand."""
    numbers = bpe_kit.numbers()
    for form in (bpe_kit.write_gpt2(tmp_path), bpe_kit.write_tokenizer(tmp_path)):
        vocabulary = read_tokenizer(str(form), "key")
        assert (vocabulary.size, vocabulary.end_of_text) == (272, 271)
        again = vocabulary_of(json.loads(json.dumps(vocabulary.to_json())))
        assert again == vocabulary
        assert isinstance(again, TextVocabulary)
        for text in SENTENCES:
            ids = again.encode(text)
            assert ids == bpe_kit.small().encode(text)
            assert again.decode(ids) == text
        assert again.encode("the king") == [numbers[t] for t in ("t", "he", "Ġking")]
        assert len(again.encode(END_OF_TEXT)) == len(END_OF_TEXT)  # a text that spells it gets its letters
        assert again.decode([271]) == END_OF_TEXT


# --- long texts ---

LETTERS = st.text(st.sampled_from("abthe \n\t\r\x1c\x85\u00a0'’1!漢"), max_size=80)


@settings(deadline=None)
@given(LETTERS, st.integers(1, 12))
def test_pieces_have_the_tokens_of_the_whole(text: str, piece: int) -> None:
    vocabulary = bpe_kit.small()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "PIECE", piece)
        cut = list(pieces([text[:7], text[7:]]))
    assert "".join(cut) == text
    assert all(1 <= len(p) <= piece for p in cut) or text == ""
    # A piece that had to be cut inside a word, or inside white space, is no promise.
    clean = all(not a[-1:].isspace() and b[0] in " \t\n\r" for a, b in pairwise(cut))
    if clean:
        assert [i for p in cut for i in vocabulary.encode(p)] == vocabulary.encode(text)


# --- mistakes ---


def test_a_text_with_what_no_token_is_for_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokenizer of a model of characters, as it is exported, has no token for any other character."""
    (text := tmp_path / "text.txt").write_text("the queen " * 40)
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizer_json(Characters("\n aeghiknostw").to_json())
    assert tokenizer
    tokenizer["model"]["vocab"]["</s>"] = 99
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=f"^data.path={text}: data.tokenizer={path}: "):
        open_data(TextData(path=str(text), tokens="bpe", tokenizer=str(path), cache_dir=str(tmp_path)), 4, 2)
    assert cli.run("prepare", [str(text), f"--out={tmp_path}/out", f"--tokenizer={path}", "--processes=1"]) == 64
    assert capsys.readouterr().err.startswith(f"error: {text}: --tokenizer: ")


def test_what_is_no_vocabulary_is_a_mistake(tmp_path: Path) -> None:
    """That none is there, faults/bad_input.yaml has."""
    for name, content in (
        ("vocab.bpe", "{}"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "\\u001b[2J\\nerror: no"}}'),
    ):
        (folder := tmp_path / name).mkdir()
        (folder / name).write_text(content)
        with pytest.raises(UserError, match=f"^data.tokenizer={folder}: ") as error:
            read_tokenizer(str(folder), "data.tokenizer")
        assert str(error.value).isprintable()


def test_the_page_trains_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("the king and the queen\n" * 100)
    (program,) = re.findall(
        r"^```python\n(from tokenizers.*?)^```", (ROOT / "docs/walkthrough.md").read_text(), re.M | re.S
    )
    exec(program, {})
    vocabulary = read_tokenizer("tokenizer.json", "key")
    assert vocabulary.end_of_text == 0
    for text in SENTENCES:
        assert vocabulary.decode(vocabulary.encode(text)) == text
    assert len(vocabulary.encode("the queen")) < 4
