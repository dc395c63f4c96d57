"""A folder of snapshots on any fsspec URL: list, read, write, commit, set aside, delete.

A snapshot is committed by its manifest: before that is there, the folder means nothing to a reader, and whatever a
killed writer left in it does no harm. Parts carry the hash of their content in their names, so two writers of one step
can only write the same bytes under one name.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

import torch

from mingpt.atomic import Buffer, sync_folder, write_whole
from mingpt.redact import without_secrets
from mingpt.snapshot.files import PROBE, SET_ASIDE, STEP_FOLDER, File, step_name
from mingpt.snapshot.format import MANIFEST, MANIFEST_LIMIT, Damaged
from mingpt.storage import is_local, modified, open_fs, place

RANGE_BYTES = 16 * 2**20


class Store:
    """The snapshots under one URL."""

    def __init__(self, url: str, key: str = "snapshot.dir") -> None:
        self.url, self.key = without_secrets(url.rstrip("/")), key  # both are for messages only
        self.fs, path = open_fs(url, key)
        self.root = path.rstrip("/")
        self.local = is_local(self.fs)

    def folder(self, step: int) -> str:
        return f"{self.root}/{step_name(step)}"

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
                names = [Path(p).name for p in self.fs.ls(self.root, detail=False)]
            except FileNotFoundError:
                return []
        return sorted((int(m[1]) for n in names if (m := STEP_FOLDER.fullmatch(n))), reverse=True)

    def files(self, step: int | None) -> list[File]:
        """What lies in a step's folder (None: beside the steps' folders), folders left out."""
        self.fs.invalidate_cache()
        with place(self.key, self.url):
            try:
                entries = self.fs.ls(self.root if step is None else self.folder(step), detail=True)
            except FileNotFoundError:
                return []
        return [
            File(step, Path(e["name"]).name, e.get("size"), modified(e)) for e in entries if e["type"] != "directory"
        ]

    def remove(self, files: Iterable[File]) -> None:
        """Delete single files, and the folders that are empty then. Another process may be doing so too."""
        folders = set()
        for file in files:
            with suppress(FileNotFoundError):
                self.fs.rm_file(f"{self.root}/{file.path}")
            if file.step is not None:
                folders.add(self.folder(file.step))
        if self.local:
            for folder in folders:
                with suppress(OSError):  # not empty
                    os.rmdir(folder)

    def size(self, step: int, name: str) -> int:
        """Raises FileNotFoundError."""
        self.fs.invalidate_cache()  # adlfs would answer from a listing that is older than our own write
        return int(self.fs.info(f"{self.folder(step)}/{name}")["size"])  # adlfs's own `size` has no limit of ours

    def read_part(self, step: int, name: str, size: int) -> memoryview:
        """A file of `size` bytes. Raises Damaged, before reading it, if it has another size."""
        self._check_file(step, name)
        path = f"{self.folder(step)}/{name}"
        try:
            if (actual := self.size(step, name)) != size:
                raise Damaged(f"{name} has {actual} bytes in place of {size}")
            # A bytearray would be filled with zeros; numpy asks for huge pages: making those takes longer than reading.
            content = torch.empty(size, dtype=torch.uint8).numpy().data
            if self.local:
                with open(path, "rb", buffering=0) as f:
                    end = 0
                    while count := f.readinto(content[end:]):
                        end += count
                if end != size:
                    raise Damaged(f"{name} has {end} bytes in place of {size}")
            else:
                self._read_ranges(path, content)
            return content
        except FileNotFoundError as error:
            raise Damaged(f"{name} is missing") from error

    def _read_ranges(self, path: str, into: memoryview) -> None:
        """One connection to an object store is far slower than the network: several ranges are under way at a time."""
        starts = range(0, len(into), RANGE_BYTES)
        ends = [min(start + RANGE_BYTES, len(into)) for start in starts]
        if len(starts) == 1 or "http" in self.fs.protocol:  # a web server may send the whole file for each range
            pieces = [self.fs.cat_file(path)]
            starts, ends = range(1), [len(into)]
        else:
            pieces = self.fs.cat_ranges([path] * len(ends), list(starts), ends, on_error="raise")
        for start, end, piece in zip(starts, ends, pieces, strict=True):
            if len(piece) != end - start:  # cut off; a client that doesn't tell
                raise OSError(f"{path}: {len(piece)} bytes came in place of {end - start}")
            into[start:end] = piece

    def read_manifest(self, step: int) -> bytes:
        raw = self._beginning_of_manifest(step)
        if len(raw) > MANIFEST_LIMIT:
            raise Damaged(f"{MANIFEST} is larger than {MANIFEST_LIMIT} bytes")
        return raw

    def _beginning_of_manifest(self, step: int) -> bytes:
        """However long it is, no more than one byte too many comes into memory."""
        self._check_file(step, MANIFEST)
        path, size = f"{self.folder(step)}/{MANIFEST}", self.size(step, MANIFEST)
        # Some S3 servers refuse a range that ends after the object, or any of an empty one.
        beginning = {"start": 0, "end": MANIFEST_LIMIT + 1} if size > MANIFEST_LIMIT else {}
        content: bytes = self.fs.cat_file(path, **beginning)
        return content

    def _check_file(self, step: int, name: str) -> None:
        """Raise Damaged for what a local file system could have in place of a file of this folder."""
        if not self.local:
            return
        folder = self.folder(step)
        path = f"{folder}/{name}"
        if Path(os.path.realpath(path)).parent != Path(os.path.realpath(folder)):
            raise Damaged(f"{name} is a link that leads outside its folder")
        if os.path.exists(path) and not os.path.isfile(path):
            raise Damaged(f"{name} is no file")  # but a folder, or a pipe that would be waited for

    def write(self, step: int, name: str, pieces: Sequence[Buffer]) -> None:
        """Write a file so that it is there whole or not at all. On an object store a put is just that."""
        target = f"{self.folder(step)}/{name}"
        if self.local:
            write_whole(Path(target), pieces)
        else:
            self.fs.pipe_file(target, b"".join(pieces))

    def commit(self, step: int, manifest: bytes) -> bool:
        """The last write of a snapshot; all its parts must be there. The first one to commit a step has the word.

        False: another writer's manifest is there already, and stays. So an attempt that wakes up late (a preempted node
        that was still uploading) replaces nothing. A store without conditional puts can't promise that.
        """
        target = f"{self.folder(step)}/{MANIFEST}"
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
            content = self._beginning_of_manifest(step)
        except Damaged:
            content = b""
        name = f"{SET_ASIDE}{why}{sha256(content).hexdigest()[:8]}-{MANIFEST}"
        old, new = f"{self.folder(step)}/{MANIFEST}", f"{self.folder(step)}/{name}"
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
        folder = self.folder(step)
        with suppress(FileNotFoundError):
            self.fs.rm_file(f"{folder}/{MANIFEST}")
        if self.local and os.path.islink(folder):  # wherever it leads: nothing but our files may go there
            self.remove([f for f in self.files(step) if f.is_ours])
            os.unlink(folder)
            return
        self.fs.invalidate_cache()
        with suppress(FileNotFoundError):
            # s3fs would ask a bucket to delete the folder, too, which is no object; nanio fails at that, with the rest.
            self.fs.rm(folder if self.local else self.fs.find(folder), recursive=self.local)
