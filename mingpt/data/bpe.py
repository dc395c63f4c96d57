"""Byte-pair encodings: GPT-2's own files through tiktoken, a Hugging Face `tokenizer.json` through `tokenizers`.

Each snapshot stores what its vocabulary is made from (GPT-2's list of merges, 0.5 MB; the text of a tokenizer.json), so
`mingpt generate` needs nothing but the snapshot. Both packages are optional (`mingpt[bpe]`): they are imported when the
first text is encoded.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mingpt.errors import UserError
from mingpt.redact import printable, without_secrets
from mingpt.storage import install, open_fs, place

END_OF_TEXT = "<|endoftext|>"
# Names of the end-of-text token in other tokenizers; the first one that a tokenizer has is used.
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]")
# How GPT-2 splits text before it merges bytes: tiktoken's faster pattern, which splits as encoder.py does (Radford et
# al. 2019).
SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
PIECE = 1 << 20  # characters that are encoded at once
FILE_LIMIT = 64 << 20  # largest file of a vocabulary, in bytes


def _needs(package: str) -> UserError:
    return UserError(f"BPE tokens need the package {package}: {install('bpe')}")


def _letters() -> dict[str, int]:
    plain = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


# GPT-2's files write each byte as a printable letter. This gives each letter's byte; its order is that of the first 256
# tokens (bytes_to_unicode in GPT-2's encoder.py).
BYTE_OF_LETTER = _letters()


@dataclass(frozen=True)
class GPT2Tokens:
    """The byte-level BPE of a `vocab.bpe`: a token for each of 256 bytes and for each merge, then the end of text."""

    merges: str

    def spelled(self) -> list[str]:
        """Every token but the end of text, by its number, in the letters of GPT-2's files.

        Raises ValueError if a line is not a merge of two tokens.
        """
        lines = self.merges.split("\n")
        merges = (line.split() for line in lines[lines[0].startswith("#version") :] if line)
        return [*BYTE_OF_LETTER, *(first + second for first, second in merges)]

    @cached_property
    def ranks(self) -> dict[bytes, int]:
        """Each token's bytes and number, equal to those of tiktoken.load.data_gym_to_mergeable_bpe_ranks."""
        ranks: dict[bytes, int] = {}
        for letters in self.spelled():
            token = bytes(BYTE_OF_LETTER[c] for c in letters)
            if token in ranks:
                raise ValueError(f"two lines make the token {letters!r}")
            ranks[token] = len(ranks)
        return ranks

    @property
    def size(self) -> int:
        return len(self.ranks) + 1

    @property
    def end_of_text(self) -> int:
        return len(self.ranks)

    @cached_property
    def _encoding(self) -> Any:
        try:
            import tiktoken
        except ImportError as error:
            raise _needs("tiktoken") from error
        special = {END_OF_TEXT: self.end_of_text}
        return tiktoken.Encoding("gpt2", pat_str=SPLIT, mergeable_ranks=self.ranks, special_tokens=special)

    def encode(self, text: str) -> list[int]:
        return self.encode_array(_unicode(text)).tolist()

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        """A text that spells `<|endoftext|>` gets the tokens of its letters, never the special token."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except ValueError:  # tiktoken's regex engine overflows on a million line ends in a row: try the halves
            if len(text) < 2:
                raise
            half = len(text) // 2
            return np.concatenate([self.encode_array(text[:half]), self.encode_array(text[half:])])

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(ids)

    def byte_lengths(self) -> list[int]:
        return [*map(len, self.ranks), 0]

    def to_json(self) -> dict[str, Any]:
        return {"kind": "gpt2", "merges": self.merges}


@dataclass(frozen=True)
class HuggingFaceTokens:
    """The tokenizer of a `tokenizer.json`, whatever its algorithm. text: the file's content."""

    text: str

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise _needs("tokenizers") from error
        try:
            tokenizer = Tokenizer.from_str(self.text)
        except BaseException as error:  # Rust's PanicException is no subclass of Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(f"not a tokenizer.json of Hugging Face: {printable(str(error))}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # a text that spells a special token gets the tokens of its letters
        return tokenizer

    @cached_property
    def size(self) -> int:
        return max(self._tokenizer.get_vocab().values()) + 1

    @property
    def end_of_text(self) -> int:
        found = [i for end in ENDS if (i := self._tokenizer.token_to_id(end)) is not None]
        if not found:
            raise UserError(f"the tokenizer has no token for the end of a text (none of {', '.join(ENDS)}): add one")
        return found[0]

    def encode(self, text: str) -> list[int]:
        text = _unicode(text)
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the package raises plain Exception, as for a character without a token
            raise UserError(
                f"the tokenizer cannot encode this text ({printable(str(error))}): take a tokenizer with an unknown "
                "token, or one of bytes"
            ) from error

    def encode_array(self, text: str) -> NDArray[np.uint32]:
        return np.array(self.encode(text), dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def byte_lengths(self) -> list[int]:
        """Of tokens that are made of bytes, as GPT-2's: those. Of others: what each adds to a text that is decoded.

        A space that the tokenizer puts before each text counts, too. Empty list: it decodes no token by itself.
        """
        decoder = json.dumps(json.loads(self.text).get("decoder"))
        lengths, numbers = [0] * self.size, self._tokenizer.get_vocab(with_added_tokens=False)
        if '"ByteLevel"' in decoder:
            for token, number in numbers.items():
                lengths[number] = len(token)  # one letter for each byte
        else:
            alone = zip(numbers.values(), self._tokenizer.decode_batch([[i] for i in numbers.values()]), strict=True)
            # A token to stand before each: the first one of a text may lose its space.
            before = next((i for i, text in alone if text.isalnum()), None)
            if before is None:
                return []
            length = len(self.decode([before]).encode())
            pairs = self._tokenizer.decode_batch([[before, i] for i in numbers.values()])
            for (token, number), text in zip(numbers.items(), pairs, strict=True):
                a_byte = '"ByteFallback"' in decoder and re.fullmatch("<0x[0-9A-F]{2}>", token)
                lengths[number] = 1 if a_byte else len(text.encode()) - length
        for number, token in self._tokenizer.get_added_tokens_decoder().items():
            lengths[number] = 0 if token.special else len(token.content.encode())
        return lengths

    def to_json(self) -> dict[str, Any]:
        return {"kind": "tokenizer.json", "text": self.text}


def gpt2_of(merges: str) -> GPT2Tokens:
    """Raises KeyError or ValueError at once, not at the first use, if these are no merges."""
    vocabulary = GPT2Tokens(merges)
    assert vocabulary.ranks
    return vocabulary


def tokenizer_of(text: str) -> HuggingFaceTokens:
    """Raises UserError or ValueError at once, not at the first use, if this is no tokenizer."""
    vocabulary = HuggingFaceTokens(text)
    assert vocabulary.size
    return vocabulary


def _unicode(text: str) -> str:
    """Raises UserError for a lone surrogate, which no tokenizer takes: Python reads a byte that is no UTF-8 as one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text is not UTF-8 at character {error.start}: convert it") from error
    return text


def pieces(text: str) -> Iterator[str]:
    """Cut a long text into pieces of at most PIECE characters, each of which ends with a word.

    No token of GPT-2 reaches from a word into the white space after it, so the tokens of the pieces are those of the
    whole text. With another tokenizer a cut may change tokens; its place depends on the text alone.
    """
    start = 0
    while len(text) - start > PIECE:
        stop = cut(text, start)
        yield text[start:stop]
        start = stop
    yield text[start:]


def cut(text: str, start: int) -> int:
    """The end of the piece that begins at `start`. More than PIECE characters must follow `start`."""
    limit = start + PIECE
    for begin in (max(start, limit - 1024), start):  # nearly always a word ends in the last kilobyte
        ends = [m.end() for m in re.finditer(r"\S(?=[ \t\n\r])", text[begin : limit + 1])]
        if ends:
            return begin + ends[-1]
    return limit


def read_tokenizer(url: str, key: str) -> GPT2Tokens | HuggingFaceTokens:
    """The vocabulary at a URL: a tokenizer.json, GPT-2's vocab.bpe, or a folder with either.

    key: the config key or option that named the URL. Raises UserError if no vocabulary is there.
    """
    fs, path = open_fs(url, key)
    shown = f"{key}={without_secrets(url)}"
    name = path.rstrip("/").rpartition("/")[2]

    def content(file: str) -> str:
        with place(key, url):
            raw = fs.cat_file(file, start=0, end=FILE_LIMIT + 1)
        if len(raw) > FILE_LIMIT:
            raise UserError(f"{shown}: {file.rpartition('/')[2]} has over {FILE_LIMIT} bytes: name a vocabulary's file")
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{shown}: {file.rpartition('/')[2]} is not UTF-8: name a vocabulary's file") from error

    with place(key, url):
        if fs.isdir(path):
            there = {file.rstrip("/").rpartition("/")[2]: file for file in fs.ls(path, detail=False)}
        elif name in ("vocab.bpe", "merges.txt"):
            there = {name: path}
        else:
            there = {"tokenizer.json": path}
    for merges, numbers in (("vocab.bpe", "encoder.json"), ("tokenizer.json", ""), ("merges.txt", "vocab.json")):
        if merges in there and not numbers:
            return _checked_tokenizer(content(there[merges]), shown)
        if merges in there:
            return _checked_merges(content(there[merges]), content(there[numbers]) if numbers in there else None, shown)
    raise UserError(
        f"{shown}: no vocabulary is there: give a folder with vocab.bpe and encoder.json, or a tokenizer.json"
    )


def _checked_tokenizer(text: str, shown: str) -> HuggingFaceTokens:
    try:
        return tokenizer_of(text)
    except (UserError, ValueError) as error:
        raise UserError(f"{shown}: {error}") from error


def _checked_merges(merges: str, numbers: str | None, shown: str) -> GPT2Tokens:
    """numbers: the text of encoder.json or vocab.json, which must give each token the number that the merges give."""
    try:
        vocabulary = gpt2_of(merges)
    except (KeyError, ValueError) as error:
        raise UserError(
            f"{shown}: not a list of GPT-2's merges ({type(error).__name__}: {error}): name a vocab.bpe"
        ) from error
    if numbers is not None:
        try:
            given = {token: number for token, number in json.loads(numbers).items() if token != END_OF_TEXT}
        except (AttributeError, ValueError):
            given = {}
        if given != {token: number for number, token in enumerate(vocabulary.spelled())}:
            raise UserError(
                f"{shown}: the two files of the vocabulary do not belong together: take both from one place"
            )
    return vocabulary
