"""Writes the shards of a data set. After a kill, the next writer resumes after the last source file that was recorded.

Shards grow in a local folder. After a source file, `record` syncs them to the disk, uploads the full shards to the data
set's URL, and writes their lengths to `progress.json`. A resumed writer truncates to those lengths.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import numpy as np

from mingpt.data.dataset import SPLITS, Shard, Split, tokens_in
from mingpt.errors import UserError
from mingpt.files.folder import Folder
from mingpt.files.localfile import NotPlain, open_below, write_whole

PROGRESS = "progress.json"
SOURCES = "sources.json"  # beside the manifest: the versions of the sources that the data set was made from


@dataclass(frozen=True)
class Done:
    """How far it is: files, the number of source files that are finished; blocks, of all files; content, the hash of
    what was read of them.
    """

    files: int = 0
    blocks: int = 0
    content: str = ""


@dataclass
class ShardWriter:
    """url: of the data set. folder: where shards grow. identity: a hash of the sources and options. commits: of the
    sources on a hub, for the next writer.

    done: how far the last writer came. Raises UserError if the folder holds the progress of another identity, or is
    damaged.
    """

    url: str
    folder: Path
    dtype: Any
    end_of_text: int
    shard_tokens: int
    identity: str
    commits: Mapping[str, str]

    def __post_init__(self) -> None:
        self.dtype = np.dtype(self.dtype).newbyteorder("<")
        self.out = Folder(self.url, "--out")
        self.staged = not (self.out.local and Path(self.out.root) == self.folder)
        self.full, self.growing = list[Shard](), dict[Split, IO[bytes]]()
        self.tokens, self.done = 0, Done()
        if (progress := Folder(str(self.folder), "--out").read(PROGRESS)) is not None:
            self._resume(progress)

    def add(self, split: Split, raw: bytes) -> None:
        """Append tokens, as little-endian integers of `dtype`, to a split."""
        self.tokens += len(raw) // self.dtype.itemsize
        rest, most = memoryview(raw), self.shard_tokens * self.dtype.itemsize
        while rest:
            if not (file := self.growing.get(split)):
                self._file(split).unlink(missing_ok=True)
                file = self.growing[split] = open(self._file(split), "xb")  # noqa: SIM115 (stays open)
            part = rest[: most - file.tell()]
            file.write(part)
            rest = rest[len(part) :]
            if file.tell() == most:
                self._close_shard(split)

    def record(self, done: Done) -> None:
        """Record durably that all tokens of the first `done.files` source files have been added."""
        for file in self.growing.values():
            file.flush()
            os.fsync(file.fileno())
        self._upload()
        progress = {
            "identity": self.identity,
            "done": asdict(done),
            "full": [shard.model_dump() for shard in self.full],
            "growing": {split: file.tell() for split, file in self.growing.items()},
            "commits": self.commits,
        }
        write_whole(self.folder / PROGRESS, [json.dumps(progress).encode()])
        if self.staged:  # uploaded, and recorded as full: a resumed writer does not truncate them
            for shard in self.full:
                (self.folder / shard.name).unlink(missing_ok=True)

    def close(self) -> tuple[Shard, ...]:
        """Finish and upload the growing shards. Returns all shards; the last one of each split may be short."""
        for split in list(self.growing):
            self._close_shard(split)
        self._upload()
        return tuple(sorted(self.full, key=lambda shard: SPLITS.index(shard.split)))

    def put(self, name: str, content: bytes) -> None:
        """Write a small file of the data set, whole or not at all."""
        self.out.write(name, content)

    def clean(self) -> None:
        """Delete everything but the finished data set."""
        (self.folder / PROGRESS).unlink(missing_ok=True)
        for left in self.folder.glob(".*.json.*"):  # temporary files of writers that were killed
            left.unlink()
        if self.staged:
            for shard in self.folder.glob("*.bin"):
                shard.unlink()

    def _file(self, split: Split) -> Path:
        return self.folder / f"{split}-{sum(shard.split == split for shard in self.full):05d}.bin"

    def _close_shard(self, split: Split) -> None:
        file, path = self.growing.pop(split), self._file(split)
        file.flush()
        os.fsync(file.fileno())
        file.close()
        tokens = np.memmap(path, self.dtype, "r")
        documents = int(np.count_nonzero(tokens == self.end_of_text))
        digest = sha256(tokens.data).hexdigest()
        self.full.append(Shard(name=path.name, split=split, tokens=len(tokens), documents=documents, sha256=digest))

    def _upload(self) -> None:
        """Copy full shards to the data set's URL, unless they were written there."""
        for shard in self.full:
            if self.staged and (self.folder / shard.name).exists():
                with self.out.named_errors():
                    self.out.fs.put_file(str(self.folder / shard.name), self.out.path(shard.name))
                    self.out.check_stored(shard.name)

    def _resume(self, recorded: bytes) -> None:
        try:
            progress = json.loads(recorded)
            identity, self.done = progress["identity"], Done(**progress["done"])
            self.full = [Shard.model_validate(shard) for shard in progress["full"]]
            for split in SPLITS:
                if size := progress["growing"].get(split):
                    self.growing[split] = self._cut_back(split, size)
                    self.tokens += size // self.dtype.itemsize
            self.tokens += tokens_in(self.full)
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            raise UserError(
                f"{self.folder}: what an earlier `mingpt prepare` left is damaged ({error}): delete the folder"
            ) from error
        if identity != self.identity:
            raise UserError(
                f"{self.out.shown}: begun with other sources or options: give those again, or delete {self.folder}"
            )

    def _cut_back(self, split: Split, size: int) -> IO[bytes]:
        """Open the growing shard as it was recorded. It may have become full since."""
        path = self._file(split)
        try:  # never through a link: truncating would cut the file that it points to
            file = os.fdopen(open_below(str(self.folder), path.name, os.O_RDWR), "r+b")
        except NotPlain as problem:
            raise ValueError(f"{path.name} {problem}") from None
        if file.seek(0, os.SEEK_END) < size:
            raise ValueError(f"{path.name} is too short")
        file.truncate(size)
        file.seek(size)
        return file
