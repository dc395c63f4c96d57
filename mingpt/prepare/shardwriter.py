"""Writes the shards of a data set so that a killed writer's successor goes on after the last finished file.

Shards grow as `.part` files in a local folder. After a source file, what has been written is made durable, full shards
go to the data set's own place, and `progress.json` notes the lengths. A successor cuts everything back to those.
"""

import json
import os
import stat
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import numpy as np

from mingpt.atomic import write_whole
from mingpt.data.dataset import MANIFEST, SPLITS, Shard, Split
from mingpt.errors import UserError
from mingpt.redact import without_secrets
from mingpt.storage import is_local, open_fs, place

PROGRESS = "progress.json"
SOURCES = "sources.json"  # beside the manifest: which versions of the sources the data set was made from


@dataclass
class _Row:
    """One split's shards: those that are full, and the one that grows."""

    split: Split
    full: list[Shard] = field(default_factory=list)
    tokens: int = 0  # in the one that grows
    documents: int = 0
    file: IO[bytes] | None = None
    hash: Any = None


class ShardWriter:
    """identity: what a data set is made from; only the same may go on with it.

    files: how many are finished. content: the hash of what was read of them. bad: how many lines were left out.
    """

    def __init__(self, url: str, folder: Path, dtype: str, end_of_text: int, shard_tokens: int, identity: str) -> None:
        self.url, self.folder, self.dtype = url, folder, np.dtype(dtype).newbyteorder("<")
        self.end_of_text, self.shard_tokens, self.identity = end_of_text, shard_tokens, identity
        self.fs, self.path = open_fs(url, "--out")
        self.staged = not (is_local(self.fs) and Path(self.path) == folder)
        self.rows = {split: _Row(split) for split in SPLITS}
        self.files, self.content, self.bad = 0, "", 0
        if (folder / PROGRESS).exists():
            self._go_on()

    def add(self, split: Split, raw: bytes) -> None:
        """Tokens at the end of a split."""
        row, width = self.rows[split], self.dtype.itemsize
        rest = memoryview(raw)
        while len(rest):
            part = rest[: (self.shard_tokens - row.tokens) * width]
            self._grow(row, part)
            rest = rest[len(part) :]
            if row.tokens == self.shard_tokens:
                self._fill(row)

    def finished(self, files: int, content: str, bad: int) -> None:
        """All tokens of the first `files` source files have been added: note that, durably."""
        for row in self.rows.values():
            if row.file:
                row.file.flush()
                os.fsync(row.file.fileno())
        self._send()
        rows = {
            row.split: {
                "full": [shard.model_dump() for shard in row.full],
                "tokens": row.tokens,
                "documents": row.documents,
            }
            for row in self.rows.values()
        }
        noted = {"identity": self.identity, "files": files, "content": content, "bad": bad, "rows": rows}
        write_whole(self.folder / PROGRESS, [json.dumps(noted).encode()])
        self.files, self.content, self.bad = files, content, bad
        if self.staged:  # they are where they belong now, and no successor cuts them back
            for row in self.rows.values():
                for shard in row.full:
                    (self.folder / shard.name).unlink(missing_ok=True)

    def close(self) -> tuple[Shard, ...]:
        """All shards; the last one of each split may be short."""
        for row in self.rows.values():
            if row.tokens:
                self._fill(row)
        self._send()
        return tuple(shard for row in self.rows.values() for shard in row.full)

    def put(self, name: str, content: bytes) -> None:
        """A small file of the data set, whole or not at all."""
        with place("--out", self.url):
            if is_local(self.fs):
                write_whole(Path(self.path) / name, [content])
            else:
                self.fs.pipe_file(f"{self.path}/{name}", content)

    def clean(self) -> None:
        """The data set is complete: nothing is left of the work."""
        (self.folder / PROGRESS).unlink(missing_ok=True)
        for name in (PROGRESS, SOURCES, MANIFEST):
            for left in self.folder.glob(f".{name}.*"):  # by one that was killed while it wrote that
                left.unlink()
        if self.staged:
            for shard in self.folder.glob("*.bin"):
                shard.unlink()

    def _part(self, row: _Row) -> Path:
        return self.folder / f"{row.split}-{len(row.full):05d}.part"

    def _grow(self, row: _Row, raw: memoryview) -> None:
        if row.file is None:
            self._part(row).unlink(missing_ok=True)
            row.file, row.hash = open(self._part(row), "xb"), sha256()  # noqa: SIM115 (it grows for long)
        row.file.write(raw)
        row.hash.update(raw)
        tokens = np.frombuffer(raw, dtype=self.dtype)
        row.tokens += len(tokens)
        row.documents += int(np.count_nonzero(tokens == self.end_of_text))

    def _fill(self, row: _Row) -> None:
        assert row.file
        row.file.flush()
        os.fsync(row.file.fileno())
        row.file.close()
        shard = Shard(
            name=f"{row.split}-{len(row.full):05d}.bin",
            split=row.split,
            tokens=row.tokens,
            documents=row.documents,
            sha256=row.hash.hexdigest(),
        )
        os.replace(self._part(row), self.folder / shard.name)
        row.full.append(shard)
        row.file, row.hash, row.tokens, row.documents = None, None, 0, 0

    def _send(self) -> None:
        """Bring full shards to the data set's place, if that is not where they are."""
        for row in self.rows.values():
            for shard in row.full:
                if self.staged and (self.folder / shard.name).exists():
                    with place("--out", self.url):
                        self.fs.put_file(str(self.folder / shard.name), f"{self.path}/{shard.name}")

    def _go_on(self) -> None:
        try:
            noted = json.loads((self.folder / PROGRESS).read_text())
            identity, self.files = noted["identity"], int(noted["files"])
            self.content, self.bad = str(noted["content"]), int(noted["bad"])
            for split, row in self.rows.items():
                kept = noted["rows"][split]
                row.full = [Shard.model_validate(shard) for shard in kept["full"]]
                self._cut_back(row, int(kept["tokens"]))
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise UserError(
                f"{self.folder}: what an earlier mingpt.data.prepare left is damaged ({error}): delete the folder"
            ) from error
        if identity != self.identity:
            shown = f"--out={without_secrets(self.url)}"
            raise UserError(f"{shown}: begun with other sources or options: give those again, or delete {self.folder}")

    def _cut_back(self, row: _Row, tokens: int) -> None:
        """The growing shard as it was at the note; it may have become full since."""
        part, full = self._part(row), self.folder / f"{row.split}-{len(row.full):05d}.bin"
        if not tokens:
            part.unlink(missing_ok=True)
            return
        source = part if os.path.lexists(part) else full
        if not stat.S_ISREG(source.lstat().st_mode):  # what it leads to is not ours to cut
            raise ValueError(f"{source.name} is no regular file")
        if source.stat().st_size < tokens * self.dtype.itemsize:
            raise ValueError(f"{source.name} is too short")
        os.truncate(source, tokens * self.dtype.itemsize)
        os.replace(source, part)
        row.file, row.hash = open(part, "r+b"), sha256()  # noqa: SIM115
        row.tokens = row.documents = 0
        while chunk := row.file.read(1 << 20):
            row.hash.update(chunk)
            read = np.frombuffer(chunk, dtype=self.dtype)
            row.tokens += len(read)
            row.documents += int(np.count_nonzero(read == self.end_of_text))
