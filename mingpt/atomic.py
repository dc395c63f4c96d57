"""Writes local files atomically: after a crash or a power cut a file is complete, or absent."""

import os
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

Buffer = bytes | bytearray | memoryview


def write_whole(path: Path, pieces: Iterable[Buffer], create: bool = False, sync: bool = True) -> None:
    """Write a temporary file, fsync it, rename it, fsync the folder. create: raise FileExistsError if `path` exists.

    sync=False: without fsync, for a file that is written often and that a power cut may take.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as f:
            f.writelines(pieces)
            f.flush()
            if sync:
                os.fsync(f.fileno())
        if create:
            _create_from(temporary, path)
        else:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if sync:
        sync_folder(path.parent)


def _create_from(temporary: Path, target: Path) -> None:
    """Link the temporary file to its name. Raises FileExistsError if that exists."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:  # no hard links on this file system; here two simultaneous writers may both succeed
        if target.exists():
            raise FileExistsError(str(target)) from None
        temporary.replace(target)


def sync_folder(path: Path) -> None:
    """fsync a folder, so that its new entries survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
