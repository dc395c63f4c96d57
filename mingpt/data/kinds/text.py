"""One text, tokenized at the start."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from mingpt.config.kinds import register
from mingpt.config.section import MISSING, NO_RESULT
from mingpt.data.kinds.files import CachedData, RowData
from mingpt.redact import without_secrets

if TYPE_CHECKING:
    from mingpt.config.schema import Config
    from mingpt.data.source import Source
    from mingpt.data.vocabulary import Vocabulary


class Tokenized(CachedData):
    """One file, tokenized at the start."""

    path: Annotated[str, NO_RESULT] = Field(default=MISSING, min_length=1)
    """The file: any fsspec URL (a local path, s3://…, gs://…, https://…)."""
    tokens: Literal["char", "byte", "bpe"] = "char"
    """What a token is: a character, a byte (256 of them), or a piece of a word (data.tokenizer)."""
    tokenizer: Annotated[str | None, NO_RESULT] = Field(default=None, min_length=1)
    """The vocabulary of bpe: a folder with GPT-2's vocab.bpe and encoder.json, or a tokenizer.json; any fsspec URL."""
    val_fraction: float = Field(default=0.1, ge=0, lt=1)
    """The share at the end of the file that is kept for validation."""

    reads = ("data.tokens", "data.tokenizer")
    validation = "raise data.val_fraction"

    def problem(self, config: "Config") -> str | None:
        if self.tokens == "bpe" and self.tokenizer is None:
            return (
                "data.tokens=bpe needs a vocabulary: set data.tokenizer=…, for instance to data/gpt2, which "
                "`mingpt fetch gpt2-vocabulary` writes"
            )
        if self.tokens != "bpe" and self.tokenizer is not None:
            shown = without_secrets(self.tokenizer)
            return f"data.tokenizer={shown}, but data.tokens={self.tokens}: set data.tokens=bpe, or leave it out"
        return None

    def extras(self) -> set[str]:
        return {"bpe"} if self.tokens == "bpe" else set()

    def encoders(self) -> tuple[str, ...]:
        return ("tokenizers",) if self.tokens == "bpe" else ()

    def vocabulary_size(self) -> int:
        return {"char": 100, "byte": 256, "bpe": 50257}[self.tokens]


@register
class TextData(Tokenized, RowData):
    kind: Literal["text"] = "text"
    """one text, tokenized at the start"""

    def open(self, block_size: int, micro_size: int, vocabulary: "Vocabulary | None" = None) -> "Source":
        from mingpt.data.text import open_text

        return open_text(self, block_size, micro_size, vocabulary)
