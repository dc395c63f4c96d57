"""Shards of an object store in a folder of each node: whole and verified, or not there; bounded; shared by processes.

A file's name is its checksum. Deleting one that a process has mapped takes nothing from that process, so the least
recently used may go at any time; who needs it again fetches it again.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from mingpt.data.dataset import Shard
from mingpt.errors import Mistake
from mingpt.redact import without_secrets
from mingpt.storage import open_fs, place

TOUCH_SECONDS = 10.0  # between two notes that a shard is in use
WAIT_SECONDS = 0.1  # between two looks for room while other processes download


class ShardCache:
    """limit: bytes of all shards in the folder, those under way included. Small when pickled."""

    def __init__(self, url: str, folder: Path, limit: int, timeout: float) -> None:
        self.url, self.folder, self.limit, self.timeout = url, folder, limit, timeout
        self._touched: dict[str, float] = {}

    def path(self, shard: Shard) -> Path:
        return self.folder / f"{shard.sha256}.bin"

    def has(self, shard: Shard) -> bool:
        """Whether it is there, noting now and then that somebody needs it."""
        path, now = self.path(shard), time.monotonic()
        if now - self._touched.get(shard.sha256, -TOUCH_SECONDS) < TOUCH_SECONDS:
            return path.exists()
        self._touched[shard.sha256] = now
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def open(self, shard: Shard, dtype: np.dtype[Any]) -> NDArray[Any]:
        """The shard's tokens, memory-mapped; fetched if need be."""
        size = shard.tokens * dtype.itemsize
        if size > self.limit:
            raise Mistake(
                f"data.cache_bytes={self.limit} is less than a shard of data.path={without_secrets(self.url)} takes: "
                f"raise it to {size} or more"
            )
        with place("data.cache_dir", str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock(shard.sha256):
                while True:  # another process may need its room before it is open
                    with suppress(FileNotFoundError):
                        return np.memmap(self.path(shard), dtype=dtype, mode="r")
                    self._fetch(shard, size)

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        try:
            with FileLock(self.folder / f"{name}.lock", timeout=self.timeout):
                yield
        except Timeout:
            raise Mistake(
                f"another process of this node has been fetching a shard of data.path for {self.timeout:.0f} s (lock "
                f"{self.folder}/{name}.lock): if it is alive, raise data.cache_timeout_seconds"
            ) from None

    def _fetch(self, shard: Shard, size: int) -> None:
        part = self.folder / f"{shard.sha256}.{size}.part"
        deadline = time.monotonic() + self.timeout
        while not self._make_room(part, size):
            if time.monotonic() > deadline:
                raise Mistake(f"data.cache_bytes={self.limit} is too little for as many processes: raise it")
            time.sleep(WAIT_SECONDS)
        try:
            fs, folder = open_fs(self.url, "data.path")
            with place("data.path", f"{self.url.rstrip('/')}/{shard.name}"):
                fs.get_file(f"{folder.rstrip('/')}/{shard.name}", str(part))
            verify(part, shard, size, f"data.path={without_secrets(self.url)}")
            with self._lock("room"):  # who counts must not miss it between its two names
                os.replace(part, self.path(shard))
        finally:
            part.unlink(missing_ok=True)

    def _make_room(self, part: Path, size: int) -> bool:
        """Delete the least recently used until `size` bytes more fit, and take the room by the name `part`."""
        with self._lock("room"):
            shards, used = list[tuple[float, int, Path]](), 0
            for entry in self.folder.iterdir():
                if entry.suffix == ".part" and entry != part and not self._abandoned(entry):
                    used += int(entry.name.split(".")[1])  # what it will be
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
        """Delete what a killed process left: nobody holds its lock."""
        try:
            with FileLock(self.folder / f"{part.name.split('.')[0]}.lock", timeout=0):
                part.unlink(missing_ok=True)
                return True
        except Timeout:
            return False


def verify(path: Path, shard: Shard, size: int, shown: str) -> None:
    """Raises Mistake unless the file is the shard."""
    cure = "copy it again, or make the data set again"
    if (found := path.stat().st_size) != size:
        raise Mistake(f"{shown}: {shard.name} has {found} bytes in place of {size}: {cure}")
    if hash_of(path) != shard.sha256:
        raise Mistake(f"{shown}: {shard.name} does not have the checksum of the manifest: {cure}")


def hash_of(path: Path) -> str:
    digest: Any = sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return str(digest.hexdigest())
