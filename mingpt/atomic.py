"""Writes local files atomically: after a crash or a power cut a file is complete, or absent."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

Buffer = bytes | bytearray | memoryview


def write_whole(path: Path, pieces: Iterable[Buffer], create: bool = False, sync: bool = True) -> None:
    """Write a temporary file, fsync it, rename it, fsync the folder. create: raise FileExistsError if `path` exists.

    sync=False: without fsync, for a file that is written often and that a power cut may take.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        write_in(folder, path.name, pieces, create, sync)
    finally:
        os.close(folder)


def write_in(folder: int, name: str, pieces: Iterable[Buffer], create: bool = False, sync: bool = True) -> None:
    """The same in a folder that is open."""
    temporary = f".{name}.{uuid4().hex}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
        with open(descriptor, "wb") as file:
            file.writelines(pieces)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        if create:
            _create_from(temporary, name, folder)
        else:
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
    if sync:
        os.fsync(folder)


def _create_from(temporary: str, name: str, folder: int) -> None:
    """Link the temporary file to its name. Raises FileExistsError if that exists."""
    try:
        os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except FileExistsError:
        raise
    except OSError:  # no hard links on this file system; here two simultaneous writers may both succeed
        with suppress(FileNotFoundError):
            os.stat(name, dir_fd=folder, follow_symlinks=False)
            raise FileExistsError(name) from None
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def sync_folder(path: Path) -> None:
    """fsync a folder, so that its new entries survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
