"""Writes the shards of a data set. After a kill, the next writer resumes after the last source file that was recorded.

Shards grow as `.part` files in a local folder. After a source file, `record` syncs them to the disk, uploads the full
shards to the data set's URL, and writes their lengths to `progress.json`. A resumed writer truncates to those lengths.
"""

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import numpy as np

from mingpt.atomic import Buffer, write_whole
from mingpt.data.dataset import MANIFEST, SPLITS, Shard, Split, tokens_in
from mingpt.errors import UserError
from mingpt.redact import without_secrets
from mingpt.storage import is_local, open_fs, place

PROGRESS = "progress.json"
SOURCES = "sources.json"  # beside the manifest: the versions of the sources that the data set was made from


@dataclass
class _SplitShards:
    """One split's shards: the full ones, and the open one, to which tokens, documents, file and hash belong."""

    split: Split
    full: list[Shard] = field(default_factory=list)
    tokens: int = 0
    documents: int = 0
    file: IO[bytes] | None = None
    hash: Any = None


class ShardWriter:
    """url: of the data set. folder: where shards grow. identity: a hash of the sources and options. commits: of the
    sources on a hub, for the next writer.

    The attributes say how far the last writer came: files, the number of source files that are finished; content, the
    hash of what was read of them; bad, the number of lines that were left out. Raises UserError if the folder holds the
    progress of another identity, or is damaged.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        dtype: str,
        end_of_text: int,
        shard_tokens: int,
        identity: str,
        commits: Mapping[str, str],
    ) -> None:
        self.commits = commits
        self.url, self.folder, self.dtype = url, folder, np.dtype(dtype).newbyteorder("<")
        self.end_of_text, self.shard_tokens, self.identity = end_of_text, shard_tokens, identity
        self.fs, self.path = open_fs(url, "--out")
        self.staged = not (is_local(self.fs) and Path(self.path) == folder)
        self.splits = {split: _SplitShards(split) for split in SPLITS}
        self.files, self.content, self.bad = 0, "", 0
        if (folder / PROGRESS).exists():
            self._resume()

    @property
    def tokens(self) -> int:
        return sum(s.tokens + tokens_in(s.full) for s in self.splits.values())

    @property
    def documents(self) -> int:
        return sum(s.documents + sum(shard.documents for shard in s.full) for s in self.splits.values())

    def add(self, split: Split, raw: bytes) -> None:
        """Append tokens, as little-endian integers of `dtype`, to a split."""
        shards, width = self.splits[split], self.dtype.itemsize
        rest = memoryview(raw)
        while len(rest):
            part = rest[: (self.shard_tokens - shards.tokens) * width]
            self._append(shards, part)
            rest = rest[len(part) :]
            if shards.tokens == self.shard_tokens:
                self._close_shard(shards)

    def record(self, files: int, content: str, bad: int) -> None:
        """Record durably that all tokens of the first `files` source files have been added."""
        for shards in self.splits.values():
            if shards.file:
                shards.file.flush()
                os.fsync(shards.file.fileno())
        self._upload()
        rows = {
            shards.split: {
                "full": [shard.model_dump() for shard in shards.full],
                "tokens": shards.tokens,
                "documents": shards.documents,
            }
            for shards in self.splits.values()
        }
        progress = {"identity": self.identity, "files": files, "content": content, "bad": bad, "rows": rows}
        if self.commits:
            progress["commits"] = self.commits
        write_whole(self.folder / PROGRESS, [json.dumps(progress).encode()])
        self.files, self.content, self.bad = files, content, bad
        if self.staged:  # uploaded, and recorded as full: a resumed writer does not truncate them
            for shards in self.splits.values():
                for shard in shards.full:
                    (self.folder / shard.name).unlink(missing_ok=True)

    def close(self) -> tuple[Shard, ...]:
        """Finish and upload the open shards. Returns all shards; the last one of each split may be short."""
        for shards in self.splits.values():
            if shards.tokens:
                self._close_shard(shards)
        self._upload()
        return tuple(shard for shards in self.splits.values() for shard in shards.full)

    def put(self, name: str, content: bytes) -> None:
        """Write a small file of the data set, whole or not at all."""
        with place("--out", self.url):
            if is_local(self.fs):
                write_whole(Path(self.path) / name, [content])
            else:
                self.fs.pipe_file(f"{self.path}/{name}", content)

    def clean(self) -> None:
        """Delete everything but the finished data set."""
        (self.folder / PROGRESS).unlink(missing_ok=True)
        for name in (PROGRESS, SOURCES, MANIFEST):
            for left in self.folder.glob(f".{name}.*"):  # temporary files of writers that were killed
                left.unlink()
        if self.staged:
            for shard in self.folder.glob("*.bin"):
                shard.unlink()

    def _part(self, shards: _SplitShards) -> Path:
        return self.folder / f"{shards.split}-{len(shards.full):05d}.part"

    def _append(self, shards: _SplitShards, raw: memoryview) -> None:
        if shards.file is None:
            self._part(shards).unlink(missing_ok=True)
            shards.file, shards.hash = open(self._part(shards), "xb"), sha256()  # noqa: SIM115 (stays open)
        shards.file.write(raw)
        self._count(shards, raw)

    def _count(self, shards: _SplitShards, raw: Buffer) -> None:
        shards.hash.update(raw)
        tokens = np.frombuffer(raw, dtype=self.dtype)
        shards.tokens += len(tokens)
        shards.documents += int(np.count_nonzero(tokens == self.end_of_text))

    def _close_shard(self, shards: _SplitShards) -> None:
        assert shards.file
        shards.file.flush()
        os.fsync(shards.file.fileno())
        shards.file.close()
        shard = Shard(
            name=f"{shards.split}-{len(shards.full):05d}.bin",
            split=shards.split,
            tokens=shards.tokens,
            documents=shards.documents,
            sha256=shards.hash.hexdigest(),
        )
        os.replace(self._part(shards), self.folder / shard.name)
        shards.full.append(shard)
        shards.file, shards.hash, shards.tokens, shards.documents = None, None, 0, 0

    def _upload(self) -> None:
        """Copy full shards to the data set's URL, unless they were written there."""
        for shards in self.splits.values():
            for shard in shards.full:
                if self.staged and (self.folder / shard.name).exists():
                    with place("--out", self.url):
                        self.fs.put_file(str(self.folder / shard.name), f"{self.path}/{shard.name}")

    def _resume(self) -> None:
        try:
            progress = json.loads((self.folder / PROGRESS).read_text())
            identity, self.files = progress["identity"], int(progress["files"])
            self.content, self.bad = str(progress["content"]), int(progress["bad"])
            for split, shards in self.splits.items():
                recorded = progress["rows"][split]
                shards.full = [Shard.model_validate(shard) for shard in recorded["full"]]
                self._truncate(shards, int(recorded["tokens"]))
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise UserError(
                f"{self.folder}: what an earlier `mingpt prepare` left is damaged ({error}): delete the folder"
            ) from error
        if identity != self.identity:
            shown = f"--out={without_secrets(self.url)}"
            raise UserError(f"{shown}: begun with other sources or options: give those again, or delete {self.folder}")

    def _truncate(self, shards: _SplitShards, tokens: int) -> None:
        """Open the unfinished shard as it was recorded: with `tokens` tokens. It may have become full since."""
        part, full = self._part(shards), self.folder / f"{shards.split}-{len(shards.full):05d}.bin"
        if not tokens:
            part.unlink(missing_ok=True)
            return
        source = part if os.path.lexists(part) else full
        if not stat.S_ISREG(source.lstat().st_mode):  # a link: truncating would cut the file that it points to
            raise ValueError(f"{source.name} is no regular file")
        if source.stat().st_size < tokens * self.dtype.itemsize:
            raise ValueError(f"{source.name} is too short")
        os.truncate(source, tokens * self.dtype.itemsize)
        os.replace(source, part)
        shards.file, shards.hash = open(part, "r+b"), sha256()  # noqa: SIM115
        shards.tokens = shards.documents = 0
        while chunk := shards.file.read(1 << 20):
            self._count(shards, chunk)
