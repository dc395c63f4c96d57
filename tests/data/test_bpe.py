"""mingpt.data.bpe: GPT-2's tokens from its own files or a tokenizer.json, and what a snapshot gives back of them."""

import json
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import bpe_kit
from mingpt.data import bpe
from mingpt.data.bpe import END_OF_TEXT, GPT2Tokens, HuggingFaceTokens, pieces, read_tokenizer
from mingpt.data.text import TextData
from mingpt.data.vocabulary import Characters, TextVocabulary, vocabulary_of
from mingpt.errors import UserError
from mingpt.prepare import fetch, prepare
from mingpt.weights.tokenizer import tokenizer_files

SENTENCES = [
    "the king!",
    " the king",
    "woe  woe\n\n\nlong 1234 live's",
    "größer – 漢字 🙂",
    "a\r\n \tb",
    "",
    "\x00\x1c x",
]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT2Tokens, HuggingFaceTokens]:
    folder = tmp_path_factory.mktemp("vocabulary")
    ours = read_tokenizer(str(bpe_kit.write_gpt2(folder / "gpt2")), "key")
    theirs = read_tokenizer(str(bpe_kit.write_tokenizer(folder / "hf")), "key")
    assert isinstance(ours, GPT2Tokens)
    assert isinstance(theirs, HuggingFaceTokens)
    return ours, theirs


@pytest.mark.parametrize("text", SENTENCES)
def test_both_forms_give_the_same_tokens_and_spell_the_text_again(
    both: tuple[GPT2Tokens, HuggingFaceTokens], text: str
) -> None:
    ours, theirs = both
    ids = ours.encode(text)
    assert theirs.encode(text) == ids  # though its file says to cut and to pad
    assert ours.decode(ids) == theirs.decode(ids) == text
    assert (ours.size, ours.end_of_text) == (theirs.size, theirs.end_of_text) == (272, 271)


def test_merges_their_order_and_the_end_of_text(both: tuple[GPT2Tokens, HuggingFaceTokens]) -> None:
    numbers = bpe_kit.numbers()
    for vocabulary in both:
        assert vocabulary.encode("the king") == [numbers[t] for t in ("t", "he", "Ġking")]
        assert len(vocabulary.encode(END_OF_TEXT)) == len(END_OF_TEXT)  # a text that spells it gets its letters
        assert vocabulary.decode([vocabulary.end_of_text]) == END_OF_TEXT
        again = vocabulary_of(json.loads(json.dumps(vocabulary.to_json())))  # from a snapshot, with no file at hand
        assert again == vocabulary
        assert isinstance(again, TextVocabulary)
        assert again.encode("the king") == vocabulary.encode("the king")


@pytest.mark.parametrize("merges", [None, 5, "a b c", "a 漢", "a b\na b"])
def test_a_strangers_merges_are_refused(merges: object) -> None:
    with pytest.raises(UserError, match="gpt2"):
        vocabulary_of({"kind": "gpt2"} | ({} if merges is None else {"merges": merges}))


@pytest.mark.parametrize("text", ["/etc/passwd", "{}", '{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_strangers_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        vocabulary_of({"kind": "tokenizer.json", "text": text})


# --- long texts ---

TIKTOKENS = "cea81b073d78785573ca8cf3c0d8b82cd38b983ca943b551cf7006440bac1935"

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


def test_a_million_line_ends_are_no_error() -> None:
    text = "\n" * 1_000_000 + "x"
    vocabulary = bpe_kit.small()
    assert vocabulary.decode(vocabulary.encode(text)) == text


# --- as a source ---


def opened(
    tmp_path: Path, tokenizer: Path, content: str = "the king woe " * 40
) -> tuple[NDArray[np.int64], TextVocabulary]:
    (tmp_path / "text.txt").write_text(content)
    config = TextData(
        path=str(tmp_path / "text.txt"), tokens="bpe", tokenizer=str(tokenizer), cache_dir=str(tmp_path / "cache")
    )
    source = config.open(4, 2)
    assert isinstance(source.vocabulary, TextVocabulary)
    return source.train[range(2)][0].numpy(), source.vocabulary


# --- mistakes ---


def test_a_text_with_what_no_token_is_for_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tokenizer of a model of characters, as it is exported, has no token for any other character."""
    words_only = tmp_path / "exported"
    words_only.mkdir()
    for name, text in tokenizer_files(Characters("\n aeghiknostw").to_json()).items():
        (words_only / name).write_text(text)
    assert opened(tmp_path, words_only)[0].shape == (2, 4)
    with pytest.raises(UserError) as error:
        opened(tmp_path, words_only, "the queen " * 40)
    assert str(error.value).startswith(f"data.path={tmp_path}/text.txt: data.tokenizer={words_only}: ")
    tokenizer = json.loads((words_only / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["</s>"] = 99
    (words_only / "tokenizer.json").write_text(json.dumps(tokenizer))
    out = ["--out", str(tmp_path / "out"), "--tokenizer", str(words_only), "--processes", "1"]
    assert prepare.main([str(tmp_path / "text.txt"), *out]) == 64
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/text.txt: --tokenizer: ")


def problem(url: Path | str) -> str:
    with pytest.raises(UserError) as error:
        read_tokenizer(str(url), "data.tokenizer")
    return str(error.value)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"vocab.bpe": "{}"},
        {"tokenizer.json": "#version"},
        {"tokenizer.json": '{"version": "1.0", "model": {"type": "\\u001b[2J\\nerror: no"}}'},
        {"vocab.bpe": bpe_kit.TEXT, "encoder.json": "{}"},
        {"vocab.bpe": bpe_kit.TEXT, "encoder.json": "["},
        {"vocab.bpe": bpe_kit.TEXT, "encoder.json": json.dumps(bpe_kit.numbers() | {"the": 5})},
    ],
    ids=range(7),
)
def test_what_is_no_vocabulary_is_a_mistake(tmp_path: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    told = problem(tmp_path)
    assert told.startswith(f"data.tokenizer={tmp_path}")
    assert told.isprintable()


def test_a_vocabulary_can_lie_anywhere_and_under_either_name(tmp_path: Path) -> None:
    folder = bpe_kit.write_gpt2(tmp_path)
    expected = bpe_kit.small()
    assert read_tokenizer(f"file://{folder}", "key") == expected
    assert read_tokenizer(str(folder / "vocab.bpe"), "key") == expected
    (folder / "vocab.bpe").rename(folder / "merges.txt")
    (folder / "encoder.json").rename(folder / "vocab.json")
    assert read_tokenizer(str(folder), "key") == expected


@pytest.mark.slow
@pytest.mark.nightly
def test_gpt2s_own_vocabulary(tmp_path: Path) -> None:
    """The tokens that tiktoken gave, in its version 0.14: of a known text, and of one with most characters."""
    assert fetch.main(["gpt2-vocabulary", "--to", str(tmp_path)]) == 0
    ours = read_tokenizer(str(tmp_path / "gpt2"), "key")
    assert ours.encode("Hello, world! minGPT") == [15496, 11, 995, 0, 949, 38, 11571]
    assert (ours.size, ours.end_of_text) == (50257, 50256)
    text = "".join(chr(p) for p in range(0x20, 0x3000) if not 0xD800 <= p < 0xE000) + " the end\n" * 3
    assert sha256(str(ours.encode(text)).encode()).hexdigest() == TIKTOKENS
