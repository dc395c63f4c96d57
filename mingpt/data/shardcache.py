"""Each node's cache of the shards in an object store: a bounded folder of verified files, shared by its processes.

A file's name is its checksum. A process that has mapped a file can still read it after it is deleted. So the least
recently used file may be deleted at any time, and a process that needs it again fetches it again.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from mingpt.cli.console import say
from mingpt.data.cache import node_lock
from mingpt.data.dataset import AGAIN, Scan, Shard, scan
from mingpt.errors import UserError
from mingpt.files.localfile import sync_folder
from mingpt.files.storage import open_fs, place

TOUCH_SECONDS = 10.0  # between two updates of a shard's modification time, by which the least recently used is found
BLOCK = 1 << 22  # bytes that are read at once
WAIT_SECONDS = 0.1  # between two searches for room while other processes download


class ShardCache:
    """limit: bytes of all shards in the folder, unfinished downloads included. vocabulary: the number of tokens.

    Small when pickled.
    """

    def __init__(self, url: str, folder: Path, limit: int, timeout: float, vocabulary: int) -> None:
        self.url, self.folder, self.limit, self.timeout = url, folder, limit, timeout
        self.vocabulary = vocabulary
        self._touched: dict[str, float] = {}
        self._scans: dict[str, Scan] = {}  # by checksum: this process scans each file once

    def path(self, shard: Shard) -> Path:
        return self.folder / f"{shard.sha256}.bin"

    def has(self, shard: Shard) -> bool:
        """Whether the shard is in the cache; its modification time then says that it is in use."""
        path, now = self.path(shard), time.monotonic()
        if now - self._touched.get(shard.sha256, -TOUCH_SECONDS) >= TOUCH_SECONDS:
            self._touched[shard.sha256] = now
            with suppress(OSError):  # the file of another user, or on a disk that can only be read
                os.utime(path)
        return path.exists()

    def open(self, shard: Shard, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The shard's tokens, memory-mapped; fetched first if need be.

        Raises UserError if the cache is too small or can't be used, or the shard is damaged or missing in the store.
        """
        size = shard.tokens * dtype.itemsize
        if size > self.limit:
            raise UserError(
                f"data.cache_bytes={self.limit} is less than a shard of data.path={self.url} takes: "
                f"raise it to {size} or more"
            )
        with place("data.cache_dir", str(self.folder)):
            while True:  # another process may delete the file, to make room, before it is mapped here
                with suppress(FileNotFoundError):
                    if self._is_whole(shard, dtype):
                        return np.memmap(self.path(shard), dtype=dtype, mode="r", shape=(shard.tokens,))
                # Only to fetch: what is there can be read by those who can't write.
                self.folder.mkdir(parents=True, exist_ok=True)
                with node_lock(self.folder / f"{shard.sha256}.lock", self.timeout):
                    if not self.path(shard).exists():  # another process may have fetched it meanwhile
                        self._fetch(shard, dtype)

    def _is_whole(self, shard: Shard, dtype: np.dtype[Any]) -> bool:
        """Whether the cached file is the shard; if not, delete it. A power cut can leave a name without content."""
        path = self.path(shard)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            found = self._scans.get(shard.sha256)
            if found is None or found.size != size:
                found = scan(file, dtype) if size == shard.tokens * dtype.itemsize else Scan(size, "", 0)
        if why := found.damage(shard, dtype):
            path.unlink(missing_ok=True)
            say(f"data.cache_dir={self.folder}: {path.name} is damaged ({why}): it is fetched again")
            return False
        self._check_tokens(shard, found)
        return True

    def _check_tokens(self, shard: Shard, found: Scan) -> None:
        """Remember the scan of a whole shard. Raises UserError if a token is beyond the vocabulary."""
        if why := found.beyond(self.vocabulary):
            raise UserError(f"data.path={self.url}: {shard.name} {why}: {AGAIN}")
        self._scans[shard.sha256] = found

    def _fetch(self, shard: Shard, dtype: np.dtype[Any]) -> None:
        size, shown = shard.tokens * dtype.itemsize, f"data.path={self.url}: {shard.name}"
        part = self.folder / f"{shard.sha256}.{size}.part"
        deadline = time.monotonic() + self.timeout
        while not self._make_room(part, size):
            if time.monotonic() > deadline:
                raise UserError(
                    f"data.cache_bytes={self.limit} is too little for the shards that the processes of this node fetch "
                    "at one time: raise it"
                )
            time.sleep(WAIT_SECONDS)
        try:
            fs, folder = open_fs(self.url, "data.path")
            source, url = (f"{where.rstrip('/')}/{shard.name}" for where in (folder, self.url))
            with place("data.path", url), fs.open(source) as sent, part.open("wb") as file:
                while block := sent.read(BLOCK):
                    file.write(block)
                    if file.tell() > size:  # a server may lie about sizes, or never end
                        raise UserError(f"{shown} has more than {size} bytes: {AGAIN}")
            with open(part, "rb") as written:
                found = scan(written, dtype)
                os.fsync(written.fileno())
            if why := found.damage(shard, dtype):
                raise UserError(f"{shown} {why}: {AGAIN}")
            self._check_tokens(shard, found)
            # _make_room must count the file under its old name or its new one
            with node_lock(self.folder / "room.lock", self.timeout):
                os.replace(part, self.path(shard))
            sync_folder(self.folder)
        finally:
            part.unlink(missing_ok=True)

    def _make_room(self, part: Path, size: int) -> bool:
        """Delete the least recently used shards until `size` more bytes fit, and reserve them by creating `part`.

        Returns False if downloads of other processes leave too little room.
        """
        with node_lock(self.folder / "room.lock", self.timeout):
            shards, used = list[tuple[float, int, Path]](), 0
            for entry in self.folder.iterdir():
                if entry.suffix == ".part" and entry != part and not self._abandoned(entry):
                    used += int(entry.name.split(".")[1])  # the name has the size that the file will have
                elif entry.suffix == ".bin":
                    with suppress(FileNotFoundError):
                        info = entry.stat()
                        shards.append((info.st_mtime, info.st_size, entry))
                        used += info.st_size
            for _, bytes_, entry in sorted(shards):
                if used + size <= self.limit:
                    break
                entry.unlink(missing_ok=True)
                used -= bytes_
            if used + size > self.limit:
                return False
            part.touch()
            return True

    def _abandoned(self, part: Path) -> bool:
        """Delete a download that a killed process left: no process holds its lock. Returns whether it was one."""
        try:
            with FileLock(self.folder / f"{part.name.split('.')[0]}.lock", timeout=0):
                part.unlink(missing_ok=True)
                return True
        except Timeout:
            return False
