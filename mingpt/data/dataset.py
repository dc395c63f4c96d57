"""The format of a prepared data set: a folder of token shards and a `manifest.json`, written last.

A shard is raw little-endian integers: np.memmap reads it as it is. The shards of a split, in the manifest's order, are
one sequence of tokens, in which the vocabulary's end of text follows each document. A document may continue in the next
shard: where a shard ends has no meaning.
"""

import codecs
import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import IO, Any, Literal

import numpy as np
from pydantic import Field, ValidationError

from mingpt.cli.console import printable
from mingpt.config.section import Sha256, Strict
from mingpt.errors import UserError

MANIFEST = "manifest.json"
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
AGAIN = "copy it again, or make the data set again"


class Shard(Strict):
    """tokens: their number. documents: the number of those that end in this shard."""

    # A manifest may come from a stranger, so a name can only be that of a file in the manifest's own folder.
    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")
    split: Split
    tokens: int = Field(ge=1)
    documents: int = Field(ge=0)
    sha256: Sha256


class DataSet(Strict):
    """A manifest. made_from: a hash of the sources' names and contents and of all options.

    By `made_from` a second `mingpt prepare` knows whether the finished data set is the one that it would write.
    """

    format: Literal["mingpt-shards-1"] = "mingpt-shards-1"
    dtype: Literal["uint8", "uint16", "uint32"]
    tokenizer: dict[str, Any]
    made_from: Sha256
    shards: tuple[Shard, ...]

    def of(self, split: Split) -> list[Shard]:
        return [shard for shard in self.shards if shard.split == split]


@dataclass(frozen=True)
class Scan:
    """What reading a file of tokens once has found: its bytes, their hash, the largest token."""

    size: int
    sha256: str
    largest: int

    def damage(self, shard: Shard, dtype: Any) -> str:
        """Why the file is not that shard; empty if it is."""
        if self.size != (expected := shard.tokens * np.dtype(dtype).itemsize):
            return f"has {self.size} bytes in place of {expected}"
        return "" if self.sha256 == shard.sha256 else "does not have the checksum of the manifest"

    def beyond(self, vocabulary: int) -> str:
        """Which token lies beyond a vocabulary of this size; empty if none does."""
        return f"has token {self.largest}, but the vocabulary only {vocabulary}" if self.largest >= vocabulary else ""


def scan(file: IO[bytes], dtype: Any) -> Scan:
    size, digest, largest, kind = 0, sha256(), 0, np.dtype(dtype).newbyteorder("<")
    while chunk := file.read(1 << 22):
        size += len(chunk)
        digest.update(chunk)
        tokens = np.frombuffer(chunk, kind, count=len(chunk) // kind.itemsize)
        largest = max(largest, int(tokens.max(initial=0)))
    return Scan(size, digest.hexdigest(), largest)


def tokens_in(shards: Sequence[Shard]) -> int:
    return sum(shard.tokens for shard in shards)


def dtype_for(size: int) -> Literal["uint16", "uint32"]:
    return "uint16" if size <= 2**16 else "uint32"


def to_bytes(dataset: DataSet) -> bytes:
    return (json.dumps(dataset.model_dump(), indent=1, ensure_ascii=False) + "\n").encode()


def from_bytes(raw: bytes, shown: str) -> DataSet:
    """Raises UserError, which begins with `shown`, if this is no manifest of a data set."""
    try:
        return DataSet.model_validate_json(raw.removeprefix(codecs.BOM_UTF8), strict=True)
    except ValidationError as errors:
        first = errors.errors()[0]
        where = printable(".".join(map(str, first["loc"]))) or "the file"
        raise UserError(
            f"{shown}: {MANIFEST} is not that of a prepared data set ({where}: {first['msg']}): make the data set "
            "again with `mingpt prepare`"
        ) from errors
