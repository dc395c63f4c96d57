"""Local files: regular ones only, never through a link, and written atomically.

A run's directory, a data set or a model may come from somebody else. A link may lead to any file of this machine,
opening a FIFO blocks, and a device may never end. So each file is opened relative to the handle of its folder, after a
look at its type, and is looked at once more when it is open. After a crash or a power cut a file that was written is
complete, or absent.
"""

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview

BROKEN = {errno.EIO, errno.EBADMSG, errno.EUCLEAN}  # a disk can't read a sector; a file system finds a wrong checksum
PAUSES = (0.5, 1.0)  # seconds before each further try to read from a broken disk
BLOB = re.compile(r"\.\./\.\./blobs/[^/]+")  # where a link in the cache of the Hugging Face hub's client leads
LINK, NO_FOLDER, NO_FILE = "is a link", "is not a folder", "is not a regular file"


class NotPlain(Exception):
    """Not a plain file or folder. The message is LINK, NO_FOLDER or NO_FILE, to be put after the path."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(what)
        self.path = path

    def as_problem(self) -> str:
        """A UserError's text about a path in a folder that may be somebody else's."""
        return (
            f"{self.path} {self}, and a run's directory, a data set and a model must hold plain folders and files "
            f"only, since others lead outside of it: remove it, or put the file itself in its place"
        )


def check_folder(path: str) -> None:
    """Raise NotPlain unless the path is a folder, or does not exist."""
    with suppress(FileNotFoundError):
        _check(path, os.lstat(path), NO_FOLDER)


def check_file(path: str) -> os.stat_result:
    """The status of a regular file. Raises NotPlain for anything else, and FileNotFoundError."""
    return _check(path, os.lstat(path), NO_FILE)


def _check(path: str, status: os.stat_result, what: str) -> os.stat_result:
    if stat.S_ISLNK(status.st_mode):
        raise NotPlain(path, LINK)
    if not (stat.S_ISDIR if what == NO_FOLDER else stat.S_ISREG)(status.st_mode):
        raise NotPlain(path, what)
    return status


def own_folder(path: Path) -> bool:
    """Make a folder for this user alone, if there is none; returns `is_own`."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return is_own(path)


def is_own(folder: Path) -> bool:
    """Whether it is a folder and no link, belongs to this user, and nobody else may write there."""
    about = folder.lstat()
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022


def open_folder(root: str, names: Sequence[str], make: bool = False) -> int:
    """Open a folder below `root`, which itself may be a link: the user names it. Returns its descriptor.

    make: make folders that are missing. Raises NotPlain and OSError.
    """
    if make:
        os.makedirs(root, exist_ok=True)
    folder = os.open(root or ".", os.O_RDONLY | os.O_DIRECTORY)
    path = root
    for name in names:
        path, above = os.path.join(path, name), folder
        try:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=above)
            _check(path, os.stat(name, dir_fd=above, follow_symlinks=False), NO_FOLDER)
            folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
        finally:
            os.close(above)
    return folder


def open_below(root: str, name: str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file below `root`; with O_CREAT its folders are made. Returns its descriptor.

    Raises NotPlain and OSError.
    """
    path, (*above, last) = os.path.join(root, name), name.split("/")
    folder = open_folder(root, above, make=bool(flags & os.O_CREAT))
    try:
        try:  # before opening it, since merely opening some devices has effects
            _check(path, os.stat(last, dir_fd=folder, follow_symlinks=False), NO_FILE)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        # Non-blocking, in case a FIFO has taken its place since.
        descriptor = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlain(path, NO_FILE)
    return descriptor


def open_cached(root: str, name: str) -> int:
    """Open to read, as `open_below` does, also in the cache of the Hugging Face hub's client.

    There SNAPSHOTS/COMMIT/NAME is a link to ../../blobs/HASH. Such a link is followed to a plain file in `blobs`, which
    belongs to the same model.
    """
    with suppress(OSError):  # no link
        target = os.readlink(os.path.join(root, name))
        if BLOB.fullmatch(target) and Path(root).resolve().parent.name == "snapshots":
            name = target
    return open_below(root, name)


def check_tree(folder: str) -> None:
    """Raise NotPlain unless all in a folder, which may be missing, are plain files and folders."""
    check_folder(folder)
    for above, folders, names in os.walk(folder):
        for name in folders:
            check_folder(os.path.join(above, name))
        for name in names:
            check_file(os.path.join(above, name))


def read_into(root: str, name: str, into: memoryview, start: int) -> Iterator[memoryview]:
    """Read a file below `root` from byte `start` on until `into` is full. Yields each piece of `into` as it is filled.

    Raises NotPlain, EOFError if the file ends too early, and OSError; one of BROKEN only after several tries.
    """
    descriptor, end = open_below(root, name), 0
    try:
        while end < len(into):
            count = again(partial(os.preadv, descriptor, [into[end:]], start + end), is_broken)
            if not count:
                raise EOFError
            yield into[end : end + count]
            end += count
    finally:
        os.close(descriptor)


def again(read: Callable[[], T], may_pass: Callable[[Exception], bool]) -> T:
    """What `read` returns; it is called again, after pauses, while it fails with what may pass."""
    for pause in PAUSES:
        try:
            return read()
        except Exception as error:
            if not may_pass(error):
                raise
        time.sleep(pause)
    return read()


def is_broken(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno in BROKEN


def write_whole(path: Path, pieces: Iterable[Buffer], sync: bool = True) -> None:
    """Write as `write_below` does, at a path that may lead through links."""
    write_below(str(path.parent), path.name, pieces, sync=sync)


def write_below(root: str, name: str, pieces: Iterable[Buffer], create: bool = False, sync: bool = True) -> None:
    """Write a temporary file, fsync it, rename it, fsync the folder. Makes folders that are missing.

    create: raise FileExistsError if the file exists. sync=False: without fsync, for a file that is written often and
    that a power cut may take. Raises NotPlain and OSError.
    """
    *above, last = name.split("/")
    folder = open_folder(root, above, make=True)
    try:
        _write_in(folder, last, pieces, create, sync)
    finally:
        os.close(folder)


def _write_in(folder: int, name: str, pieces: Iterable[Buffer], create: bool, sync: bool) -> None:
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
