"""Opens local files and folders in a run's directory that may come from somebody else: plain ones only, no links.

A link may point to any file of this machine, opening a FIFO blocks, and a device may never end. So each file is checked
before it is opened, and again through its descriptor, when it can no longer be replaced.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mingpt.errors import UserError

BROKEN = {errno.EIO, errno.EBADMSG, errno.EUCLEAN}  # of a bad sector, or a file system's checksum
PAUSES = (0.5, 1.0)  # seconds before a failed read is repeated
LINK, NO_FOLDER, NO_FILE = "is a link", "is no folder", "is no file"


class NotPlain(Exception):
    """A path is a link, or not of the wanted kind; the message is one of the texts above."""


def check_folder(path: str) -> None:
    """Raise NotPlain unless `path` is a folder, or does not exist."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        raise NotPlain(LINK if stat.S_ISLNK(mode) else NO_FOLDER)


def check_file(path: str) -> os.stat_result:
    """Raise NotPlain unless `path` is a regular file; FileNotFoundError if it does not exist."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise NotPlain(LINK if stat.S_ISLNK(found.st_mode) else NO_FILE)
    return found


def open_file(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file. Raises NotPlain if it or its folder is a link or something else; OSError."""
    if not flags & os.O_CREAT or os.path.lexists(path):
        check_file(path)  # before opening, which makes some devices act
    above, name = os.path.split(path)
    check_folder(above or ".")
    folder = os.open(above or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # Non-blocking, in case the file has been replaced by a FIFO since.
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlain(NO_FILE)
    return descriptor


def read_into(path: str, into: memoryview, start: int = 0) -> Iterator[memoryview]:
    """Fill `into` from a regular file, from offset `start` on; yields each part that has been read.

    Raises NotPlain, EOFError if the file is too short, and OSError; one of BROKEN only after retries.
    """
    descriptor, end = open_file(path), 0
    try:
        while end < len(into):
            count = _read_patiently(descriptor, into[end:], start + end)
            if not count:
                raise EOFError
            yield into[end : end + count]
            end += count
    finally:
        os.close(descriptor)


def _read_patiently(descriptor: int, into: memoryview, start: int) -> int:
    """One read, repeated after PAUSES if the disk fails."""
    for pause in PAUSES:
        try:
            return os.preadv(descriptor, [into], start)
        except OSError as error:
            if error.errno not in BROKEN:
                raise
        time.sleep(pause)
    return os.preadv(descriptor, [into], start)


def check_all_plain(folder: str, key: str) -> None:
    """Raise UserError unless `folder` has plain files and folders only, or does not exist. key: its config key."""
    path = folder
    try:
        check_folder(folder)
        for path in sorted(str(p) for p in Path(folder).iterdir()) if os.path.exists(folder) else []:
            with suppress(FileNotFoundError):  # another process has removed its temporary file
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    check_file(path)
    except NotPlain as problem:
        raise UserError(f"{key}={link_problem(path, str(problem))}") from problem


def link_problem(path: str, what: str) -> str:
    """The text of a UserError about a path that is not plain."""
    return (
        f"{path} {what}, and a run's directory must hold plain folders and files only, since others lead outside of "
        f"it: remove it, or copy the run without it"
    )
