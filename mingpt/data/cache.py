"""Each node's cache of prepared data: an array to memory-map, and JSON about it, made by one process for all."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from mingpt.cli.console import say
from mingpt.config.datasets import CachedData
from mingpt.data.dataset import scan
from mingpt.errors import UserError
from mingpt.files.localfile import sync_folder, write_whole
from mingpt.files.storage import place

PART = ".part"  # the array while it is made: under one name, so that a process that was killed leaves one file at most
TELL_SECONDS = 30.0  # a longer wait for another process is told


class ArrayFile:
    """A .npy file, written block by block. The first block's type is that of all, also if it is empty."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.length = file, 0
        self._type, self._row = np.dtype(float), tuple[int, ...]()

    def append(self, block: NDArray[Any]) -> None:
        if not self.file.tell():
            self._type, self._row = block.dtype, block.shape[1:]
            self._write_header()
        self.file.write(np.ascontiguousarray(block).data)
        self.length += len(block)

    def finish(self) -> None:
        """Write the header again, which keeps room for the length, and all of it to the disk."""
        self.file.seek(0)
        self._write_header()
        self.file.flush()
        os.fsync(self.file.fileno())

    def _write_header(self) -> None:
        fields = {"descr": np.lib.format.dtype_to_descr(self._type), "fortran_order": False}
        np.lib.format.write_array_header_1_0(self.file, fields | {"shape": (self.length, *self._row)})


@contextmanager
def node_lock(lock: Path, seconds: float) -> Iterator[None]:
    """Let one process of this node in at a time.

    Raises UserError if the one that is in has not written to the files that it makes for so many seconds.
    """
    file, left = FileLock(lock), seconds
    while True:
        before = _written(lock)
        try:
            file.acquire(timeout=min(left, TELL_SECONDS))
            break
        except Timeout:
            if left == seconds:
                say(f"another process of this node is reading data.path: this one waits (lock {lock})")
            left = seconds if _written(lock) != before else left - TELL_SECONDS
        if left <= 0:
            raise UserError(
                f"another process of this node has been reading data.path, without progress for {seconds:.0f} s (lock "
                f"{lock}): if it is alive, raise data.cache_timeout_seconds"
            )
    try:
        yield
    finally:
        file.release()


def _written(lock: Path) -> set[tuple[str, int]]:
    """When each file that is made under this lock was written last."""
    found = set[tuple[str, int]]()
    for part in lock.parent.glob(f"{lock.stem}*{PART}*"):
        with suppress(FileNotFoundError):
            found.add((part.name, part.stat().st_mtime_ns))
    return found


def cached(
    config: CachedData, identity: list[Any], make: Callable[[ArrayFile], dict[str, Any]]
) -> tuple[Path, dict[str, Any]]:
    """The .npy file that `make` fills, and the JSON that it returns. The first process of the node calls it.

    What is complete is read without the lock, which another user, or a reader of a read-only disk, could not take.
    identity: all that the result depends on. Its first entry, the kind of data, begins the file's name.
    Raises UserError if data.cache_dir can't be used, or another process has held its lock for too long.
    """
    folder = Path(config.cache_dir).expanduser()
    name = sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:32]
    stem = folder / f"{identity[0]}-{name}"
    array, about, part = (stem.with_suffix(suffix) for suffix in (".npy", ".json", PART))
    with place("data.cache_dir", str(folder)):
        if (known := _known(array, about)) is not None:
            return array, known
        folder.mkdir(parents=True, exist_ok=True)
        with node_lock(stem.with_suffix(".lock"), config.cache_timeout_seconds):
            known = _known(array, about)
            if known is None:
                try:
                    with open(part, "wb") as file:
                        known = make(made := ArrayFile(file))
                        made.finish()
                    part.replace(array)
                finally:
                    part.unlink(missing_ok=True)
                sync_folder(folder)
                # Written last: it commits the array.
                write_whole(about, [json.dumps({"array": _hash_of(array), "known": known}).encode()])
        return array, known


def _known(array: Path, about: Path) -> dict[str, Any] | None:
    """The JSON about a cached array; None if either file is missing or damaged, as a power cut may leave them."""
    if not (about.exists() and array.exists()):
        return None
    with suppress(ValueError, KeyError, TypeError):
        stored = json.loads(about.read_text())
        if stored["array"] == _hash_of(array):
            return dict(stored["known"])
    say(f"data.cache_dir={about.parent}: {array.name} or {about.name} is damaged: both are made again")
    return None


def _hash_of(path: Path) -> str:
    with open(path, "rb") as file:
        return scan(file, "u1").sha256
