"""What tokens stand for. Each snapshot's manifest stores its vocabulary whole: reading it back takes no other file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mingpt.data.bpe import GPT2Tokens, HuggingFaceTokens
from mingpt.data.source import Vocabulary
from mingpt.errors import UserError

Json = dict[str, Any]  # plain, as a manifest has it


@dataclass(frozen=True)
class Characters:
    """One token for each character, in code-point order."""

    characters: str

    @property
    def size(self) -> int:
        return len(self.characters)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {c: i for i, c in enumerate(self.characters)}

    def encode(self, text: str) -> list[int]:
        if unknown := sorted(set(text) - self._ids.keys()):
            raise UserError(f"the text has characters that the model never saw: {''.join(unknown)!r}")
        return [self._ids[c] for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.characters[i] for i in ids)

    def byte_lengths(self) -> list[int]:
        return [len(c.encode(errors="surrogatepass")) for c in self.characters]

    def to_json(self) -> Json:
        return {"kind": "char", "characters": self.characters}


@dataclass(frozen=True)
class Bytes:
    """One token for each of the 256 bytes."""

    size = 256

    def encode(self, text: str) -> list[int]:
        try:
            return list(text.encode(errors="surrogateescape"))  # Python reads bytes that aren't UTF-8 as surrogates
        except UnicodeEncodeError as error:
            raise UserError(f"the text is no Unicode: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def byte_lengths(self) -> list[int]:
        return [1] * 256

    def to_json(self) -> Json:
        return {"kind": "byte", "characters": ""}


@dataclass(frozen=True)
class NoTokens:
    """The vocabulary of data without tokens (rows of numbers), for a model of one's own."""

    size = 0

    def to_json(self) -> Json:
        return {"kind": "none"}


@dataclass(frozen=True)
class Numbers:
    """Tokens without a meaning; as text they are written as numbers."""

    size: int

    def encode(self, text: str) -> list[int]:
        words = text.split()
        if not words or any(not w.isdecimal() or int(w) >= self.size for w in words):
            raise UserError(f"the tokens are numbers from 0 to {self.size - 1} with spaces between, not {text!r}")
        return [int(w) for w in words]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def to_json(self) -> Json:
        return {"kind": "numbers", "size": self.size}


def _text(json: Json, key: str) -> str:
    if not isinstance(value := json[key], str):
        raise TypeError(f"{key} is no text")
    return value


def _number(json: Json, key: str) -> int:
    if not isinstance(value := json[key], int) or value < 1:
        raise TypeError(f"{key} is no number of tokens")
    return value


def _chats(json: Json) -> dict[str, str]:
    return {key: _text(json, key) for key in ("template", "end") if key in json}


# Each kind's constructor. A manifest may be a stranger's, so a constructor opens and imports nothing that it names.
KINDS: dict[str, Callable[[Json], Vocabulary]] = {
    "char": lambda json: Characters(_text(json, "characters")),
    "byte": lambda json: Bytes(),
    "none": lambda json: NoTokens(),
    "numbers": lambda json: Numbers(_number(json, "size")),
    "gpt2": lambda json: GPT2Tokens(_text(json, "merges"), **_chats(json)),
    "tokenizer.json": lambda json: HuggingFaceTokens(_text(json, "text"), **_chats(json)),
}


def vocabulary_of(json: Json) -> Vocabulary:
    """The vocabulary whose `to_json()` this is. Raises UserError if it is damaged or of an unknown kind."""
    kind = json.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(
            f"a vocabulary of the kind {kind!r}; this version knows {', '.join(KINDS)}: take the version of mingpt "
            "that wrote it"
        )
    try:
        return KINDS[kind](json)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"a damaged vocabulary of the kind {kind!r}: {type(error).__name__}: {error}") from error
