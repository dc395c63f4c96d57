"""mingpt.data.bpe: GPT-2's tokens from its own files or a tokenizer.json, and what a snapshot gives back of them."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

import bpe_kit
from mingpt.data import bpe
from mingpt.data.bpe import END_OF_TEXT, GPT2Tokens, HuggingFaceTokens, pieces, read_tokenizer
from mingpt.data.kinds.text import TextData
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
    assert ours.encode_array(text).tolist() == theirs.encode_array(text).tolist() == ids
    assert (ours.size, ours.end_of_text) == (theirs.size, theirs.end_of_text) == (272, 271)


def test_merges_are_applied_in_their_order() -> None:
    numbers = bpe_kit.numbers()
    assert bpe_kit.small().encode("the king") == [numbers[t] for t in ("t", "he", "Ġking")]
    assert bpe_kit.small().encode(" the") == [numbers["Ġthe"]]


def test_ranks_are_those_that_tiktoken_reads(tmp_path: Path) -> None:
    folder = bpe_kit.write_gpt2(tmp_path)
    theirs = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    assert bpe_kit.small().ranks == theirs


def test_a_text_that_spells_the_end_of_text_gets_its_letters(both: tuple[GPT2Tokens, HuggingFaceTokens]) -> None:
    for vocabulary in both:
        assert len(vocabulary.encode(END_OF_TEXT)) == len(END_OF_TEXT)
        assert vocabulary.decode([vocabulary.end_of_text]) == END_OF_TEXT


def test_a_snapshot_gives_back_the_vocabulary_with_no_file_at_hand(both: tuple[GPT2Tokens, HuggingFaceTokens]) -> None:
    for vocabulary in both:
        again = vocabulary_of(json.loads(json.dumps(vocabulary.to_json())))
        assert again == vocabulary
        assert isinstance(again, TextVocabulary)
        assert again.encode("the king") == vocabulary.encode("the king")


@pytest.mark.parametrize(
    "content",
    [
        {"kind": "gpt2"},
        {"kind": "gpt2", "merges": 5},
        {"kind": "gpt2", "merges": "a b c"},
        {"kind": "gpt2", "merges": "a 漢"},
        {"kind": "gpt2", "merges": "a b\na b"},
        {"kind": "tokenizer.json", "text": "/etc/passwd"},
        {"kind": "tokenizer.json", "text": "{}"},
        {"kind": "tokenizer.json", "text": '{"version": "1.0", "model": {"type": "BPE"}}'},
    ],
)
def test_a_strangers_vocabulary_is_refused_in_one_sentence(content: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"^(a damaged vocabulary of the kind|not a tokenizer\.json)"):
        vocabulary_of(content)


def test_nothing_but_the_two_packages_is_needed_and_the_mistake_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)
    assert bpe_kit.small().size == 272  # a snapshot can be looked at without it
    cure = r"^BPE tokens need the package tiktoken: pip install -e '\.\[bpe\]' in the checkout$"
    with pytest.raises(UserError, match=cure):
        bpe_kit.small().encode("a")


# --- long texts ---

LETTERS = st.text(st.sampled_from("abthe \n\t\r\x1c\x85\u00a0'’1!漢"), max_size=80)


@settings(deadline=None)
@given(LETTERS, st.integers(1, 12))
def test_pieces_have_the_tokens_of_the_whole(text: str, piece: int) -> None:
    vocabulary = bpe_kit.small()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "PIECE", piece)
        cut = list(pieces(text))
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


def test_a_text_is_trained_on_by_bpe(tmp_path: Path) -> None:
    samples, vocabulary = opened(tmp_path, bpe_kit.write_gpt2(tmp_path / "gpt2"))
    assert samples[0].tolist() == vocabulary.encode("the king woe the king woe")[:4]
    again, other = opened(tmp_path, bpe_kit.write_tokenizer(tmp_path / "hf"))
    assert np.array_equal(again, samples)
    assert other != vocabulary  # another file, so another vocabulary


# --- mistakes ---


@pytest.fixture
def words_only(tmp_path: Path) -> Path:
    """The tokenizer of a model of characters, as it is exported: without a token for any other character."""
    folder = tmp_path / "exported"
    folder.mkdir()
    for name, text in tokenizer_files(Characters("\n aeghiknostw").to_json()).items():
        (folder / name).write_text(text)
    return folder


def test_a_text_with_what_no_token_is_for_is_a_mistake(tmp_path: Path, words_only: Path) -> None:
    assert opened(tmp_path, words_only)[0].shape == (2, 4)
    with pytest.raises(UserError) as error:
        opened(tmp_path, words_only, "the queen " * 40)
    assert str(error.value) == (
        f"data.path={tmp_path}/text.txt: data.tokenizer={words_only}: the tokenizer cannot encode this text (WordLevel "
        "error: Missing [UNK] token from the vocabulary): take a tokenizer with an unknown token, or one of bytes"
    )


def test_prepare_names_a_tokenizer_that_cannot_encode_its_text(
    tmp_path: Path, words_only: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = json.loads((words_only / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["</s>"] = 99
    (words_only / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "a.txt").write_text("the queen")
    out = ["--out", str(tmp_path / "out"), "--tokenizer", str(words_only), "--processes", "1"]
    assert prepare.main([str(tmp_path / "a.txt"), *out]) == 64
    told = capsys.readouterr().err
    assert told.startswith(f"error: {tmp_path}/a.txt: --tokenizer: the tokenizer cannot encode this text (")


def problem(url: Path | str) -> str:
    with pytest.raises(UserError) as error:
        read_tokenizer(str(url), "data.tokenizer")
    return str(error.value)


def test_a_place_without_a_vocabulary_is_a_mistake(tmp_path: Path) -> None:
    assert problem(tmp_path / "none") == (
        f"data.tokenizer={tmp_path}/none: there is no such file or bucket: check the spelling"
    )
    assert problem(tmp_path) == (
        f"data.tokenizer={tmp_path}: no vocabulary is there: give a folder with vocab.bpe and encoder.json, "
        "or a tokenizer.json"
    )


def test_files_that_do_not_belong_together_are_a_mistake(tmp_path: Path) -> None:
    folder = bpe_kit.write_gpt2(tmp_path)
    for wrong in ("{}", "[]", "{", json.dumps(bpe_kit.numbers() | {"the": 5})):
        (folder / "encoder.json").write_text(wrong)
        assert "do not belong together" in problem(folder)


@pytest.mark.parametrize(("name", "content"), [("vocab.bpe", "{}"), ("tokenizer.json", "#version"), ("x.json", "[1]")])
def test_a_file_that_is_no_vocabulary_is_a_mistake(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert problem(tmp_path / name).startswith(f"data.tokenizer={tmp_path / name}: not a ")


def test_a_strangers_tokenizer_moves_no_cursor(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "\x1b[2J\nerror: no"}}))
    assert problem(tmp_path / "tokenizer.json").isprintable()


def test_a_vocabulary_can_lie_anywhere_and_under_either_name(tmp_path: Path) -> None:
    folder = bpe_kit.write_gpt2(tmp_path)
    expected = bpe_kit.small()
    assert read_tokenizer(f"file://{folder}", "key") == expected
    assert read_tokenizer(str(folder / "vocab.bpe"), "key") == expected
    (folder / "vocab.bpe").rename(folder / "merges.txt")
    (folder / "encoder.json").rename(folder / "vocab.json")
    assert read_tokenizer(str(folder), "key") == expected


@pytest.mark.slow
def test_gpt2s_own_vocabulary(tmp_path: Path) -> None:
    """The known tokens of a known text, from both packages; and all that tiktoken itself would give."""
    from tokenizers import ByteLevelBPETokenizer

    assert fetch.main(["gpt2-vocabulary", "--to", str(tmp_path)]) == 0
    known = [15496, 11, 995, 0, 949, 38, 11571]
    ours = read_tokenizer(str(tmp_path / "gpt2"), "key")
    assert ours.encode("Hello, world! minGPT") == known
    assert (ours.size, ours.end_of_text) == (50257, 50256)
    encoder, merges = (str(tmp_path / "gpt2" / name) for name in ("encoder.json", "vocab.bpe"))
    ByteLevelBPETokenizer.from_file(encoder, merges).save(str(tmp_path / "tokenizer.json"))
    theirs = read_tokenizer(str(tmp_path / "tokenizer.json"), "key")
    assert theirs.encode("Hello, world! minGPT") == known
    assert (theirs.size, theirs.end_of_text) == (50257, 50256)
    ranks = data_gym_to_mergeable_bpe_ranks(merges, encoder)
    plain = tiktoken.Encoding("x", pat_str=bpe.SPLIT, mergeable_ranks=ranks, special_tokens={})
    text = "".join(chr(p) for p in range(0x20, 0x3000) if not 0xD800 <= p < 0xE000) + " the end\n" * 3
    assert ours.encode(text) == plain.encode_ordinary(text) == theirs.encode(text)
