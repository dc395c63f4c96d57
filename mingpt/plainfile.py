"""Local files and folders in a place that may be a stranger's: used only if they are plain, never through a link.

A link may lead to anybody's files, a FIFO is waited for, a device may never end. So each is looked at before it is
opened, and again once it is open, when nobody can put another one in its place.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mingpt.errors import UserError

BROKEN = {errno.EIO, errno.EBADMSG, errno.EUCLEAN}  # what a disk says of a sector, a file system of a checksum
PAUSES = (0.5, 1.0)  # seconds before a broken disk is asked again
LINK, NO_FOLDER, NO_FILE = "is a link", "is no folder", "is no file"


class NotPlain(Exception):
    """Says what is wrong: one of the texts above."""


def check_folder(path: str) -> None:
    """Raise NotPlain unless a folder is there, or nothing."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        raise NotPlain(LINK if stat.S_ISLNK(mode) else NO_FOLDER)


def check_file(path: str) -> os.stat_result:
    """Raise NotPlain unless a regular file is there, or FileNotFoundError."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise NotPlain(LINK if stat.S_ISLNK(found.st_mode) else NO_FILE)
    return found


def open_file(path: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file whose folder is no link either. Raises NotPlain or an OSError."""
    if not flags & os.O_CREAT or os.path.lexists(path):
        check_file(path)  # before opening: that alone makes some devices act
    above, name = os.path.split(path)
    check_folder(above or ".")
    folder = os.open(above or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # Non-blocking: a FIFO that has come since would be waited for.
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlain(NO_FILE)
    return descriptor


def read_into(path: str, into: memoryview, start: int = 0) -> Iterator[memoryview]:
    """What lies in a regular file from `start` on, as it comes, until `into` is full.

    Raises NotPlain, EOFError where the file ends before that, or an OSError: of BROKEN, if that came each time.
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
    """A disk may fail once, and not when it is asked again."""
    for pause in PAUSES:
        try:
            return os.preadv(descriptor, [into], start)
        except OSError as error:
            if error.errno not in BROKEN:
                raise
        time.sleep(pause)
    return os.preadv(descriptor, [into], start)


def check_all_plain(folder: str, key: str) -> None:
    """Raise UserError, naming the config `key`, unless a folder of plain files and folders is there, or nothing."""
    path = folder
    try:
        check_folder(folder)
        for path in sorted(str(p) for p in Path(folder).iterdir()) if os.path.exists(folder) else []:
            with suppress(FileNotFoundError):  # a temporary file of another process
                if not stat.S_ISDIR(os.lstat(path).st_mode):
                    check_file(path)
    except NotPlain as problem:
        raise UserError(f"{key}={link_problem(path, str(problem))}") from problem


def link_problem(path: str, what: str) -> str:
    """For a UserError, in one form wherever a run's directory has what it must not have."""
    return (
        f"{path} {what}, and a run's directory must hold plain folders and files only, since others lead outside of "
        f"it: remove it, or copy the run without it"
    )
