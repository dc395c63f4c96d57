"""Any amount of text, tokenized before."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from mingpt.config.kinds import register
from mingpt.config.section import MISSING, NO_RESULT
from mingpt.data.kinds.files import RowData

if TYPE_CHECKING:
    from mingpt.data.source import Source
    from mingpt.data.vocabulary import Vocabulary


@register
class ShardsData(RowData):
    kind: Literal["shards"] = "shards"
    """any amount of text, tokenized before"""
    path: Annotated[str, NO_RESULT] = Field(default=MISSING, min_length=1)
    """The folder that `mingpt prepare` has written, or one with nanoGPT's train.bin and val.bin: any fsspec URL."""
    tokenizer: Annotated[str | None, NO_RESULT] = Field(default=None, min_length=1)
    """The vocabulary of nanoGPT's files, which name none, as for text; null: numbers, which spell no text."""
    documents: Literal["joined", "apart"] = "joined"
    """apart: a token sees nothing of the documents before its own, and positions count from its document's start."""
    cache_bytes: Annotated[int, NO_RESULT] = Field(default=2**35, ge=1)
    """Most bytes of shards that a node keeps in cache_dir, when data.path is no local folder."""

    validation = "prepare them with a larger --val-fraction"

    def open(self, block_size: int, micro_size: int, vocabulary: "Vocabulary | None" = None) -> "Source":
        from mingpt.data.shards import open_shards

        return open_shards(self, block_size, micro_size, vocabulary)

    def extras(self) -> set[str]:
        return {"bpe"} if self.tokenizer else set()
