"""Shards of an object store in a folder of each node: whole and verified, or not there; bounded; shared by processes.

A file's name is its checksum. Deleting one that a process has mapped takes nothing from that process, so the least
recently used may go at any time; who needs it again fetches it again.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from fsspec.callbacks import Callback
from numpy.typing import NDArray

from mingpt.atomic import sync_folder
from mingpt.console import say
from mingpt.data.dataset import AGAIN, Look, Shard, look_at
from mingpt.errors import UserError
from mingpt.redact import without_secrets
from mingpt.storage import open_fs, place

TOUCH_SECONDS = 10.0  # between two notes that a shard is in use
WAIT_SECONDS = 0.1  # between two looks for room while other processes download


class ShardCache:
    """limit: bytes of all shards in the folder, those under way included. vocabulary: how many tokens there are.

    Small when pickled.
    """

    def __init__(self, url: str, folder: Path, limit: int, timeout: float, vocabulary: int) -> None:
        self.url, self.folder, self.limit, self.timeout = url, folder, limit, timeout
        self.vocabulary = vocabulary
        self._touched: dict[str, float] = {}
        self._looked: dict[str, Look] = {}  # what this process has found in the files: each is hashed once

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
            raise UserError(
                f"data.cache_bytes={self.limit} is less than a shard of data.path={without_secrets(self.url)} takes: "
                f"raise it to {size} or more"
            )
        with place("data.cache_dir", str(self.folder)):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._lock(shard.sha256):
                while True:  # another process may need its room before it is open
                    with suppress(FileNotFoundError):
                        if self._is_whole(shard, dtype):
                            return np.memmap(self.path(shard), dtype=dtype, mode="r", shape=(shard.tokens,))
                    self._fetch(shard, dtype)

    def _is_whole(self, shard: Shard, dtype: np.dtype[Any]) -> bool:
        """Whether the cached file is the shard: a power cut leaves names without content. One that isn't is deleted."""
        path = self.path(shard)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            look = self._looked.get(shard.sha256)
            if look is None or look.size != size:
                look = look_at(file, dtype) if size == shard.tokens * dtype.itemsize else Look(size, "", 0)
        if why := look.damage(shard, dtype):
            path.unlink(missing_ok=True)
            say(f"data.cache_dir={self.folder}: {path.name} is damaged ({why}): it is fetched again")
            return False
        self._admit(shard, look)
        return True

    def _admit(self, shard: Shard, look: Look) -> None:
        if why := look.stranger(self.vocabulary):
            raise UserError(f"data.path={without_secrets(self.url)}: {shard.name} {why}: {AGAIN}")
        self._looked[shard.sha256] = look

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        try:
            with FileLock(self.folder / f"{name}.lock", timeout=self.timeout):
                yield
        except Timeout:
            raise UserError(
                f"another process of this node has been fetching a shard of data.path for {self.timeout:.0f} s (lock "
                f"{self.folder}/{name}.lock): if it is alive, raise data.cache_timeout_seconds"
            ) from None

    def _fetch(self, shard: Shard, dtype: np.dtype[Any]) -> None:
        size, shown = shard.tokens * dtype.itemsize, f"data.path={without_secrets(self.url)}: {shard.name}"
        part = self.folder / f"{shard.sha256}.{size}.part"
        deadline = time.monotonic() + self.timeout
        while not self._make_room(part, size):
            if time.monotonic() > deadline:
                raise UserError(f"data.cache_bytes={self.limit} is too little for as many processes: raise it")
            time.sleep(WAIT_SECONDS)
        try:
            fs, folder = open_fs(self.url, "data.path")
            with place("data.path", f"{self.url.rstrip('/')}/{shard.name}"):
                fs.get_file(f"{folder.rstrip('/')}/{shard.name}", str(part), callback=_AtMost(size, shown))
            with open(part, "rb") as file:
                look = look_at(file, dtype)
                os.fsync(file.fileno())
            if why := look.damage(shard, dtype):
                raise UserError(f"{shown} {why}: {AGAIN}")
            self._admit(shard, look)
            with self._lock("room"):  # who counts must not miss it between its two names
                os.replace(part, self.path(shard))
            sync_folder(self.folder)
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


class _AtMost(Callback):
    """Ends a download that brings more than it should: a server may lie about sizes, or never end."""

    def __init__(self, size: int, shown: str) -> None:
        super().__init__()
        self.most, self.shown = size, shown

    def relative_update(self, inc: int = 1) -> None:
        self.absolute_update(self.value + inc)

    def absolute_update(self, value: int) -> None:
        self.value = value
        if value > self.most:
            raise UserError(f"{self.shown} has more than {self.most} bytes: {AGAIN}")
