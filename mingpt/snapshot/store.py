"""A folder of snapshots on any fsspec URL: list, read, write, commit, set aside, delete.

A snapshot is committed by its manifest: before that is there, the folder means nothing to a reader, and whatever a
killed writer left in it does no harm. Parts carry the hash of their content in their names, so two writers of one step
can only write the same bytes under one name.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import torch

from mingpt.atomic import Buffer, sync_folder, write_whole
from mingpt.errors import Damaged, Unreadable, UserError
from mingpt.plainfile import (
    BROKEN,
    PAUSES,
    NotPlain,
    check_file,
    check_folder,
    link_problem,
    read_into,
)
from mingpt.redact import without_secrets
from mingpt.snapshot.files import METRICS, PROBE, SET_ASIDE, SNAPSHOTS, STEP_FOLDER, File, step_name
from mingpt.snapshot.format import MANIFEST, MANIFEST_LIMIT
from mingpt.storage import is_local, modified, open_fs, place
from mingpt.webfile import is_web, read_stream

RANGE_BYTES = 16 * 2**20
PIECE_BYTES = 4 * 2**20  # of a local file


def _room(size: int) -> memoryview:
    """A bytearray would be filled with zeros; numpy asks for huge pages: making those takes longer than reading."""
    return torch.empty(size, dtype=torch.uint8).numpy().data


@contextmanager
def _missing(name: str) -> Iterator[None]:
    """A part that the manifest names and that is not there is damage."""
    try:
        yield
    except FileNotFoundError as error:
        raise Damaged(f"{name} is missing") from error


class Store:
    """The snapshots under one URL."""

    def __init__(self, url: str, key: str = "snapshot.dir") -> None:
        self.given = url.rstrip("/")
        self.url, self.key = without_secrets(self.given), key  # both are for messages only
        self.fs, path = open_fs(url, key)
        self.root = path.rstrip("/")
        self.local = is_local(self.fs)

    def folder(self, step: int) -> str:
        return f"{self.root}/{step_name(step)}"

    def _folder(self, step: int | None) -> str:
        """As `folder` (None: that above them), for use. Raises UserError if a link stands there: it would lead outside.

        A link that the user names is the user's; not one under the name that a run's directory has for it.
        """
        folder = self.root if step is None else self.folder(step)
        if self.local:
            inside = [self.root] if Path(self.root).name in (SNAPSHOTS, METRICS) else []
            for path in (*inside, *([] if step is None else [folder])):
                try:
                    check_folder(path)
                except NotPlain as problem:
                    raise UserError(f"{self.key}={link_problem(path, str(problem))}") from problem
        return folder

    def folder_url(self, step: int) -> str:
        """For messages."""
        return f"{self.url}/{step_name(step)}"

    def steps(self) -> list[int]:
        """The committed steps, newest first."""
        with place(self.key, self.url):
            return [s for s in self.folders() if self.fs.exists(f"{self.folder(s)}/{MANIFEST}")]

    def folders(self) -> list[int]:
        """The steps that have a folder, committed or not, newest first."""
        self.fs.invalidate_cache()  # object-store clients remember listings; another process may have written since
        with place(self.key, self.url):
            try:
                names = [Path(p).name for p in self.fs.ls(self._folder(None), detail=False)]
            except FileNotFoundError:
                return []
            steps = sorted((int(m[1]) for n in names if (m := STEP_FOLDER.fullmatch(n))), reverse=True)
            for step in steps:
                self._folder(step)  # for its check: one link, and nothing here is done
        return steps

    def files(self, step: int | None) -> list[File]:
        """What lies in a step's folder (None: beside the steps' folders), folders left out."""
        self.fs.invalidate_cache()
        with place(self.key, self.url):
            try:
                entries = self.fs.ls(self._folder(step), detail=True)
            except FileNotFoundError:
                return []
        return [
            # Of a link, a FIFO or a device there is no size to be trusted: who needs one asks `size`, which refuses.
            File(step, Path(e["name"]).name, e.get("size") if e["type"] == "file" else None, modified(e))
            for e in entries
            if e["type"] != "directory"
        ]

    def remove(self, files: Iterable[File]) -> None:
        """Delete single files, and the folders that are empty then. Another process may be doing so too."""
        folders = set()
        for file in files:
            folder = self._folder(file.step)
            with suppress(FileNotFoundError):
                self.fs.rm_file(f"{folder}/{file.name}")
            if file.step is not None:
                folders.add(folder)
        if self.local:
            for folder in folders:
                with suppress(OSError):  # not empty
                    os.rmdir(folder)

    def size(self, step: int | None, name: str) -> int:
        """Raises FileNotFoundError, and Damaged if it is no file."""
        path = f"{self._folder(step)}/{name}"
        if self.local:
            try:
                return check_file(path).st_size
            except NotPlain as problem:
                raise Damaged(f"{name} {problem}") from problem
        self.fs.invalidate_cache()  # adlfs would answer from a listing that is older than our own write
        size = self.fs.info(path)["size"]  # adlfs's own `size` has no limit of ours
        if not isinstance(size, int):
            raise Damaged(f"{name}: its server does not tell its size")
        return size

    def read_part(self, step: int, name: str, size: int) -> memoryview:
        """A file of `size` bytes. Raises Damaged, before reading it, if it has another size."""
        path = self._checked(step, name, size)
        content = _room(size)
        with _missing(name):
            if self.local:
                for _ in self._local_pieces(path, content):
                    pass
            elif is_web(self.fs):
                end = 0
                for piece in self._web_pieces(path, size):
                    content[end : end + len(piece)] = piece
                    end += len(piece)
            else:
                self._read_ranges(path, content)
        return content

    def read_pieces(self, step: int | None, name: str, size: int) -> Iterator[memoryview]:
        """A file of `size` bytes, piece by piece; each is valid until the next. Raises Damaged if it has another size.

        So a file of any length is looked through with little memory.
        """
        path = self._checked(step, name, size)
        most = PIECE_BYTES if self.local else RANGE_BYTES
        buffer = _room(min(size, most))
        with _missing(name):
            if is_web(self.fs):
                yield from self._web_pieces(path, size)
                return
            for start in range(0, size, most):
                piece = buffer[: size - start]
                if self.local:
                    yield from self._local_pieces(path, piece, start)
                else:
                    self._read_ranges(path, piece, start, whole=size <= most)
                    yield piece

    def _checked(self, step: int | None, name: str, size: int) -> str:
        """The path of a file. Raises Damaged if it has another size."""
        with _missing(name):
            if (actual := self.size(step, name)) != size:
                raise Damaged(f"{name} has {actual} bytes in place of {size}")
        return f"{self._folder(step)}/{name}"

    def _local_pieces(self, path: str, into: memoryview, start: int = 0) -> Iterator[memoryview]:
        """What lies from `start` on, as it comes, until `into` is full."""
        name = Path(path).name
        try:
            yield from read_into(path, into, start)
        except NotPlain as what:  # since its size was asked for
            raise Damaged(f"{name} {what}") from what
        except EOFError as error:
            raise Damaged(f"{name} has become shorter while it was read") from error
        except OSError as error:
            if error.errno not in BROKEN:
                raise
            problem = f"{name}: {error.strerror}, {len(PAUSES) + 1} times: look at the disk"
            raise Unreadable(f"{self.key}={self.url}: {problem}") from error

    def _web_pieces(self, path: str, size: int) -> Iterator[memoryview]:
        """A web server may send the whole file for each range, so it is asked once; and more than it has said."""
        end = 0
        for piece in read_stream(self.fs, path, size + 1):
            end += len(piece)
            if end > size:
                raise Damaged(f"{Path(path).name} has more than the {size} bytes that its server tells")
            yield memoryview(piece)
        if end != size:  # cut off
            raise OSError(f"{path}: {end} bytes came in place of {size}")

    def _read_ranges(self, path: str, into: memoryview, first: int = 0, whole: bool = True) -> None:
        """What lies from `first` on. whole: nothing else is in the file.

        One connection to an object store is far slower than the network: several ranges are under way at a time.
        """
        starts = range(first, first + len(into), RANGE_BYTES)
        ends = [min(start + RANGE_BYTES, first + len(into)) for start in starts]
        if whole and len(starts) == 1:
            pieces = [self.fs.cat_file(path)]
        else:
            pieces = self.fs.cat_ranges([path] * len(ends), list(starts), ends, on_error="raise")
        for start, end, piece in zip(starts, ends, pieces, strict=True):
            if len(piece) != end - start:  # cut off; a client that doesn't tell
                raise OSError(f"{path}: {len(piece)} bytes came in place of {end - start}")
            into[start - first : end - first] = piece

    def read_manifest(self, step: int) -> bytes:
        """However long it is or its server makes it, no more than MANIFEST_LIMIT comes into memory."""
        size = self.size(step, MANIFEST)
        if size > MANIFEST_LIMIT:
            raise Damaged(f"{MANIFEST} is larger than {MANIFEST_LIMIT} bytes")
        if self.local or is_web(self.fs):
            return b"".join(bytes(piece) for piece in self.read_pieces(step, MANIFEST, size))
        content: bytes = self.fs.cat_file(f"{self._folder(step)}/{MANIFEST}")
        return content

    def write(self, step: int | None, name: str, pieces: Iterable[Buffer]) -> None:
        """Write a file so that it is there whole or not at all. On an object store a put is just that."""
        target = f"{self._folder(step)}/{name}"
        if self.local:
            write_whole(Path(target), pieces)
        else:
            self.fs.pipe_file(target, b"".join(pieces))

    def commit(self, step: int, manifest: bytes) -> bool:
        """The last write of a snapshot; all its parts must be there. The first one to commit a step has the word.

        False: another writer's manifest is there already, and stays. So an attempt that wakes up late (a preempted node
        that was still uploading) replaces nothing. A store without conditional puts can't promise that.
        """
        target = f"{self._folder(step)}/{MANIFEST}"
        try:
            if self.local:
                write_whole(Path(target), [manifest], create=True)
                sync_folder(Path(self.root))  # the step's folder itself
            elif self.conditional_puts:
                self.fs.pipe_file(target, manifest, mode="create")
            else:
                self.fs.pipe_file(target, manifest)
        except FileExistsError:
            return False
        return True

    @cached_property
    def conditional_puts(self) -> bool:
        """Whether this store refuses to create what exists. Tried, since clients take the option and some ignore it."""
        if self.local:
            return True
        probe = f"{self.root}/{PROBE}{uuid4().hex}"
        with place(self.key, self.url):
            self.fs.pipe_file(probe, b"1")
            try:
                self.fs.pipe_file(probe, b"2", mode="create")
                return False
            except FileExistsError:
                return True
            except (TypeError, ValueError, NotImplementedError):  # a client without the option
                return False
            finally:
                self.fs.rm_file(probe)

    def set_aside(self, step: int, why: str = "") -> str:
        """Un-commit a snapshot without deleting anything: rename its manifest. Returns the new name.

        why: REWOUND or OVERTAKEN, which its name then says; a damaged one has none.
        """
        try:
            token = sha256(self.read_manifest(step)).hexdigest()
        except Damaged:  # nothing to tell it by, and an earlier one must not be replaced
            token = uuid4().hex
        name = f"{SET_ASIDE}{why}{token[:8]}-{MANIFEST}"
        old, new = f"{self._folder(step)}/{MANIFEST}", f"{self._folder(step)}/{name}"
        if self.local:
            os.replace(old, new)
        else:
            self.fs.cp_file(old, new)
            self.fs.rm_file(old)
        return name

    def delete(self, step: int) -> None:
        """Manifest first: a reader sees the whole snapshot or none. Another process may be deleting it too.

        What was set aside in its folder goes with it.
        """
        folder = self._folder(step)
        with suppress(FileNotFoundError):
            self.fs.rm_file(f"{folder}/{MANIFEST}")
        self.fs.invalidate_cache()
        with suppress(FileNotFoundError):
            # s3fs would ask a bucket to delete the folder, too, which is no object; nanio fails at that, with the rest.
            self.fs.rm(folder if self.local else self.fs.find(folder), recursive=self.local)
