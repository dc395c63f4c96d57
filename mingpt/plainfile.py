"""Open local files of a run's directory that may come from somebody else: regular files only, never through a link.

A link may lead to any file of this machine, opening a FIFO blocks, and a device may never end. So the type of each file
is checked before it is opened, and once more on the open descriptor, when nobody can replace it any more.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mingpt.errors import UserError

BROKEN = {errno.EIO, errno.EBADMSG, errno.EUCLEAN}  # a disk can't read a sector; a file system finds a wrong checksum
PAUSES = (0.5, 1.0)  # seconds before each further try to read from a broken disk
LINK, NO_FOLDER, NO_FILE = "is a link", "is not a folder", "is not a regular file"


class NotPlain(Exception):
    """Not a plain file or folder. The message is LINK, NO_FOLDER or NO_FILE, to be put after a path."""


def check_folder(path: str) -> None:
    """Raise NotPlain unless the path is a folder, or does not exist."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        raise NotPlain(LINK if stat.S_ISLNK(mode) else NO_FOLDER)


def check_file(path: str) -> os.stat_result:
    """The status of a regular file. Raises NotPlain for anything else, and FileNotFoundError."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise NotPlain(LINK if stat.S_ISLNK(found.st_mode) else NO_FILE)
    return found


def open_file(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file in a folder that is not a link; returns its descriptor. Raises NotPlain and OSError."""
    if not flags & os.O_CREAT or os.path.lexists(path):
        check_file(path)  # before opening it, since merely opening some devices has effects
    above, name = os.path.split(path)
    check_folder(above or ".")
    folder = os.open(above or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # Non-blocking, in case a FIFO has taken its place since.
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlain(NO_FILE)
    return descriptor


def read_into(path: str, into: memoryview, start: int = 0) -> Iterator[memoryview]:
    """Read a regular file from byte `start` on until `into` is full. Yields each piece of `into` as it is filled.

    Raises NotPlain, EOFError if the file ends too early, and OSError; one of BROKEN only after several tries.
    """
    descriptor, end = open_file(path), 0
    try:
        while end < len(into):
            count = _read_with_retries(descriptor, into[end:], start + end)
            if not count:
                raise EOFError
            yield into[end : end + count]
            end += count
    finally:
        os.close(descriptor)


def _read_with_retries(descriptor: int, into: memoryview, start: int) -> int:
    for pause in PAUSES:
        try:
            return os.preadv(descriptor, [into], start)
        except OSError as error:
            if error.errno not in BROKEN:
                raise
        time.sleep(pause)
    return os.preadv(descriptor, [into], start)


def check_all_plain(folder: str, key: str) -> None:
    """Raise UserError, naming the config `key`, unless a folder holds only plain files and folders, or is missing."""
    path = folder
    try:
        check_folder(folder)
        for path in sorted(str(p) for p in Path(folder).iterdir()) if os.path.exists(folder) else []:
            with suppress(FileNotFoundError):  # another process has renamed its temporary file
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    check_file(path)
    except NotPlain as problem:
        raise UserError(f"{key}={link_problem(path, str(problem))}") from problem


def link_problem(path: str, what: str) -> str:
    """A UserError's text about a path in a run's directory. what: a NotPlain's message."""
    return (
        f"{path} {what}, and a run's directory must hold plain folders and files only, since others lead outside of "
        f"it: remove it, or copy the run without it"
    )
