"""Local files that are there whole or not at all, after a crash and after a power cut."""

import os
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

Buffer = bytes | bytearray | memoryview


def write_whole(path: Path, pieces: Iterable[Buffer], create: bool = False) -> None:
    """Write a file, and make it survive a power cut. create: raise FileExistsError if it is there already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as f:
            f.writelines(pieces)
            f.flush()
            os.fsync(f.fileno())
        if create:
            _create_from(temporary, path)
        else:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def _create_from(temporary: Path, target: Path) -> None:
    """Give a whole file its name at once, unless that exists (FileExistsError)."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: two writers in one instant may both succeed
        if target.exists():
            raise FileExistsError(str(target)) from None
        temporary.replace(target)


def sync_folder(path: Path) -> None:
    """Make a folder's new entries survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
