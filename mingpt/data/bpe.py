"""Byte-pair encodings: GPT-2's own files, or a Hugging Face `tokenizer.json`. The package `tokenizers` encodes both.

Each snapshot stores what its vocabulary is made from (GPT-2's list of merges, 0.5 MB; the text of a tokenizer.json), so
`mingpt generate` needs nothing but the snapshot. The package is optional (`mingpt-exact[bpe]`): it is imported when
the first text is encoded.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mingpt.cli.console import printable
from mingpt.errors import UserError
from mingpt.files.folder import ModelFolder
from mingpt.files.storage import install, name_of

END_OF_TEXT = "<|endoftext|>"
# Names of the end-of-text token in other tokenizers; the first one that a tokenizer has is used.
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "[SEP]")
PIECE = 1 << 20  # characters that are encoded at once
WORDS = re.compile(r"(?s).*\S(?=[ \t\n\r])")  # up to the last one that white space follows
MERGES, TOKENIZER = FILES = ("vocab.bpe", "tokenizer.json")  # of a vocabulary
FILE_LIMIT = 64 << 20  # bytes of the largest
BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


# GPT-2's files write each byte as a printable letter. This gives each letter's byte; its order is that of the first 256
# tokens (bytes_to_unicode in GPT-2's encoder.py).
PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = sorted({*range(256)} - {*PLAIN})
BYTE_OF_LETTER = {chr(b): b for b in PLAIN} | {chr(256 + i): b for i, b in enumerate(OTHERS)}


@dataclass(frozen=True, kw_only=True)
class Encoder(ABC):
    """Encodes and decodes as its tokenizer.json says. Its constructor raises UserError or ValueError for a bad one.

    template: how it spells conversations (template.py). A text that spells a special token is then that token, as in
    transformers; otherwise it gets the tokens of its letters. end: the special token that ends an answer; "": none.
    """

    template: str = ""
    end: str = ""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of tokens."""

    def __post_init__(self) -> None:
        assert self.size

    @property
    @abstractmethod
    def file(self) -> str:
        """The text of the tokenizer.json."""

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UserError(f"BPE tokens need the package tokenizers: {install('bpe')}") from error
        try:
            tokenizer = Tokenizer.from_str(self.file)
        except BaseException as error:  # Rust's PanicException is no subclass of Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(f"not a tokenizer.json of Hugging Face: {printable(str(error))}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.post_processor = None  # it would shift offsets, and nothing else without special tokens
        tokenizer.encode_special_tokens = not self.template
        return tokenizer

    @cached_property
    def specials(self) -> list[str]:
        """The texts of its special tokens."""
        return [t.content for t in self._tokenizer.get_added_tokens_decoder().values() if t.special]

    def encode(self, text: str) -> list[int]:
        """Raises UserError if no tokens spell the text."""
        ids: list[int] = self.encoding(text).ids
        return ids

    def encoding(self, text: str) -> Any:
        """With `ids`, and `offsets`: for each token, the first of its characters and the one after its last."""
        tokenizer = self._tokenizer
        try:
            text.encode()
            return tokenizer.encode(text, add_special_tokens=False)
        except UnicodeEncodeError as error:  # Python reads a byte that is no UTF-8 as half a character
            raise UserError(f"the text is not UTF-8 at character {error.start}: convert it") from error
        except Exception as error:  # the package raises plain Exception, as for a character without a token
            raise UserError(
                f"the tokenizer cannot encode this text ({printable(str(error))}): take a tokenizer with an unknown "
                "token, or one of bytes"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def to_json(self) -> dict[str, Any]:
        return {"template": self.template, "end": self.end} if self.template else {}


@dataclass(frozen=True)
class GPT2Tokens(Encoder):
    """The byte-level BPE of a `vocab.bpe`: a token for each of 256 bytes and for each merge, then the end of text."""

    merges: str

    @cached_property
    def pairs(self) -> list[list[str]]:
        """The two tokens of each merge."""
        lines = self.merges.split("\n")
        return [line.split() for line in lines[lines[0].startswith("#version") :] if line]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Each token's number, the end of text's last. Tokens are in the letters of GPT-2's files.

        Raises ValueError if a line is not a merge.
        """
        tokens = dict.fromkeys(BYTE_OF_LETTER)
        for pair in self.pairs:
            token = "".join(pair)
            if len(pair) != 2 or token in tokens or not tokens.keys() >= {*pair}:
                raise ValueError(f"not a list of GPT-2's merges ({token!r} is no new pair of tokens): name a vocab.bpe")
            tokens[token] = None
        return {token: number for number, token in enumerate([*tokens, END_OF_TEXT])}

    @cached_property
    def size(self) -> int:
        return len(self.numbers)

    @property
    def end_of_text(self) -> int:
        return self.numbers[END_OF_TEXT]

    @property
    def file(self) -> str:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        fields = {
            "version": "1.0",
            "added_tokens": [flags | {"id": self.end_of_text, "content": END_OF_TEXT, "special": True}],
            "pre_tokenizer": BYTE_LEVEL,
            "decoder": BYTE_LEVEL,
            "model": {"type": "BPE", "vocab": self.numbers, "merges": self.pairs},
        }
        return json.dumps(fields)

    def byte_lengths(self) -> list[int]:
        return [*map(len, [*self.numbers][:-1]), 0]

    def to_json(self) -> dict[str, Any]:
        return {"kind": "gpt2", "merges": self.merges} | super().to_json()


@dataclass(frozen=True)
class HuggingFaceTokens(Encoder):
    """The tokenizer of a `tokenizer.json`, whatever its algorithm. text: the file's content."""

    text: str

    @property
    def file(self) -> str:
        return self.text

    @cached_property
    def size(self) -> int:
        return max(self._tokenizer.get_vocab().values()) + 1

    @property
    def end_of_text(self) -> int:
        for end in (self.end, *ENDS):
            number: int | None = self._tokenizer.token_to_id(end)
            if number is not None:
                return number
        raise UserError(f"the tokenizer has no token for the end of a text (none of {', '.join(ENDS)}): add one")

    def byte_lengths(self) -> list[int]:
        """The number of bytes of each token, if tokens are made of bytes, as GPT-2's are; else an empty list."""
        if '"ByteLevel"' not in json.dumps(json.loads(self.text).get("decoder")):
            return []
        lengths = [0] * self.size
        for token, number in self._tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[number] = len(token)  # one letter for each byte
        for number, token in self._tokenizer.get_added_tokens_decoder().items():
            lengths[number] = 0 if token.special else len(token.content.encode())
        return lengths

    def to_json(self) -> dict[str, Any]:
        return {"kind": "tokenizer.json", "text": self.text} | super().to_json()


def pieces(blocks: Iterable[str]) -> Iterator[str]:
    """Cut a long text, given in blocks, into pieces of at most PIECE characters, each of which ends with a word.

    No token of GPT-2 reaches from a word into the white space after it, so the tokens of the pieces are those of the
    whole text. With another tokenizer a cut may change tokens; its place depends on the text alone.
    """
    rest = ""
    for block in blocks:
        rest, start = rest + block, 0
        while len(rest) - start > PIECE:
            stop = cut(rest, start)
            yield rest[start:stop]
            start = stop
        rest = rest[start:]
    yield rest


def cut(text: str, start: int) -> int:
    """The end of the piece that begins at `start`. More than PIECE characters must follow `start`."""
    words = WORDS.match(text, start, start + PIECE + 1)
    return words.end() if words else start + PIECE


def read_tokenizer(url: str, key: str) -> GPT2Tokens | HuggingFaceTokens:
    """The vocabulary at a URL: a tokenizer.json, GPT-2's vocab.bpe, or a folder or the hub's model with either.

    key: the config key or option that named the URL. Raises UserError if no vocabulary is there.
    """
    files = ModelFolder(url, key, FILES).files(FILE_LIMIT)
    try:
        if not files:
            raise ValueError(f"no vocabulary is there: give a folder with a {TOKENIZER}, or with GPT-2's {MERGES}")
        name, raw = next(iter(files.items()))
        return (GPT2Tokens if MERGES in (name, name_of(url)) else HuggingFaceTokens)(raw.decode("utf-8-sig"))
    except (UserError, ValueError) as error:
        raise UserError(f"{key}={url}: {error}") from error
