"""Files under one URL, on a local disk or in a store: list, read, write whole, create only, append.

Most are those of a run's directory, a data set or a model, which may be a stranger's. So on a local disk no link below
the URL is followed, and only plain files and folders are opened (localfile.py). Nothing is read that is larger than
such a file is.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from mingpt.cli.console import complain, printable
from mingpt.errors import Incomplete, Unreadable, UserError
from mingpt.files.localfile import (
    PAUSES,
    Buffer,
    T,
    again,
    check_file,
    is_broken,
    open_below,
    open_cached,
    open_folder,
    write_below,
)
from mingpt.files.storage import hub_folder, is_denied, is_local, may_pass, open_fs, place, unmasked, words_of

LARGEST = 2**28  # bytes of a file: metrics of a million logged steps
# What is written there, besides snapshots.
FILES = ("run-id", "elsewhere.json", "config.yaml", "report.html")
EVENTS = "events.out.tfevents*"  # TensorBoard's
FOLDERS = ("attempts", "metrics", "trace", "ledger", "profile", "memory")
ANY = re.compile(".*", re.S)
NEIGHBOURS = 5  # files that are asked for when one can't be read


def alone(run_dir: str, host: str) -> str:
    """What to say of a run on one node's disk. run_dir: without secrets."""
    return (
        f"run.dir={run_dir} is on {printable(host)}'s disk alone: if that machine goes, so does the run; "
        f"RUN_DIR=s3://… (run.dir) survives it"
    )


class File(NamedTuple):
    """name: below the run's directory. size: None if the store does not report it."""

    match: "re.Match[str]"
    name: str
    size: int | None


class Folder:
    """The files under `url`. key: the config key or argument that names it, for messages.

    Methods raise what `storage.place` makes of errors: UserError for a link.
    """

    def __init__(self, url: str, key: str = "run.dir") -> None:
        self.fs, path = open_fs(url, key)
        self.root = path.rstrip("/") or "/"
        self.url, self.key = url if self.root == "/" else url.rstrip("/"), key
        self.shown = f"{key}={self.url}"
        self.local = is_local(self.fs)

    def named_errors(self) -> AbstractContextManager[None]:
        """Turn errors into UserError and TransientError as `storage.place` does, which name the key and the URL."""
        return place(self.key, self.url)

    def path(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def check(self) -> None:
        """Raise UserError for a link, a FIFO or a device in place of what a run writes; locally."""
        if self.local:
            with self.named_errors():
                for path in (*map(self.path, FILES), *map(str, Path(self.root).glob(EVENTS))):
                    with suppress(FileNotFoundError):
                        check_file(path)
            for name in FOLDERS:
                self.find(name, ANY)

    def open_to_read(self, name: str) -> IO[bytes]:
        """A file. Raises what the client raises; locally NotPlain, too."""
        return os.fdopen(open_cached(self.root, name), "rb") if self.local else self.fs.open(self.path(name))

    def read(self, name: str, most: int = LARGEST) -> bytes | None:
        """A file; None if there is none. Raises UserError for one of more than `most` bytes, and Unreadable."""
        with self.named_errors():
            try:
                return self._bounded(name, self.again(lambda: self._read(name, most)), most)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except Exception as error:
                self.raise_unreadable(name, error)
                raise

    def read_or_skip(self, name: str, most: int = LARGEST) -> bytes | None:
        """Read as `read` does, but a file that alone can't be read is named in a line, and counts as not there."""
        try:
            return self.read(name, most)
        except Unreadable as error:
            complain(f"{error}: it is left out")
            return None

    def _read(self, name: str, most: int) -> bytes:
        if not self.local:
            self.fs.invalidate_cache()
            return self._cat(name, self.fs.info(self.path(name))["size"], most)
        with self.open_to_read(name) as file:
            return file.read(min(os.fstat(file.fileno()).st_size, most) + 1)

    def again(self, read: Callable[[], T]) -> T:
        """What a broken disk or a store hands out, asked for again if it fails. Not of a store that does not answer at
        all: each call has a long limit.
        """
        return again(read, is_broken if self.local else may_pass)

    def raise_unreadable(self, name: str, error: Exception) -> None:
        """Raise Unreadable if a file could not be read, and others beside it can: then it is not the disk or the store
        that has failed.
        """
        error = unmasked(error)
        if self.local:
            alone, why = is_broken(error), f"{error}, {len(PAUSES) + 1} times: look at the disk"
        else:
            alone = (is_denied(error) or may_pass(error)) and self._others_answer(name)
            why = f"others in there can be read: {words_of(error)}"
        if alone:
            raise Unreadable(f"{self.shown}: {name}: {why}") from error

    def _others_answer(self, name: str) -> bool:
        """Whether another file can be read: one of those of the last folders, which are the newest steps'."""
        own = self.path(name).lstrip("/")
        with suppress(Exception):  # of any client: it does not answer
            found = {
                p.rpartition("/")[0]: p for p in sorted(self.fs.find(self.root, maxdepth=2)) if p.lstrip("/") != own
            }
            paths = [*found.values()][-NEIGHBOURS:]
            raw = self.fs.cat_ranges(paths, [0] * len(paths), [1] * len(paths), on_error="return")
            return any(isinstance(content, bytes) for content in raw)
        return False

    def read_all(self, files: Iterable[File]) -> dict[str, bytes]:
        """Files by name, without those that are gone, and those that alone can't be read, which are named in a line.

        Object stores answer for many at a time.
        """
        files, read = [*files], dict[str, bytes]()
        if not self.local and all(file.size for file in files):
            with self.named_errors():
                ends = [min(file.size or 0, LARGEST + 1) for file in files]
                raw = self.fs.cat_ranges([self.path(f.name) for f in files], [0] * len(files), ends, on_error="return")
            read = {f.name: c for f, c in zip(files, raw, strict=True) if isinstance(c, bytes)}
        for name in [file.name for file in files if file.name not in read]:
            if (content := self.read_or_skip(name)) is not None:
                read[name] = content
        return {name: self._bounded(name, content, LARGEST) for name, content in read.items()}

    def _cat(self, name: str, size: int | None, most: int) -> bytes:
        # S3 refuses a range of an empty object, and some servers one that ends after the object.
        end = most + 1 if size is None else min(size, most + 1)
        return b"" if size == 0 else bytes(self.fs.cat_file(self.path(name), start=0, end=end))

    def _bounded(self, name: str, raw: bytes, most: int) -> bytes:
        if len(raw) > most:
            where = f"{self.key}={self.path(name)}"
            raise UserError(f"{where} has more than {most:,} bytes, more than any such file: put the right one there")
        return raw

    def entries(self, folder: str = "") -> dict[str, dict[str, Any]]:
        """What is in a folder, by name, as fsspec describes it; nothing if the folder does not exist."""
        self.fs.invalidate_cache()  # object-store clients cache listings; another process may have written since
        with self.named_errors():
            try:
                listed = self.fs.ls(self.path(folder) if folder else self.root, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        return {Path(entry["name"]).name: entry for entry in listed}

    def subfolders(self) -> list[str]:
        """The names of the folders in it, sorted."""
        return sorted(name for name, entry in self.entries().items() if entry["type"] == "directory")

    def find(self, folder: str, pattern: "re.Pattern[str]") -> list[File]:
        """The files in a folder whose names match, sorted by name. Raises UserError for a link."""
        if not self.local:
            sizes = {name: entry.get("size") for name, entry in self.entries(folder).items()}
        else:
            with self.named_errors():
                try:
                    sizes = dict.fromkeys(self._plain(folder))
                except (FileNotFoundError, NotADirectoryError):
                    return []
        return [File(m, f"{folder}/{n}", sizes[n]) for n in sorted(sizes) if (m := pattern.fullmatch(n))]

    def _plain(self, folder: str) -> list[str]:
        """The names in a local folder. Raises NotPlain if one is neither a file nor a folder."""
        descriptor = open_folder(self.root, folder.split("/"))
        try:
            with os.scandir(descriptor) as entries:
                names = [*entries]
                for entry in names:
                    if not entry.is_dir(follow_symlinks=False):
                        with suppress(FileNotFoundError):  # another process has renamed its temporary file
                            check_file(self.path(f"{folder}/{entry.name}"))
        finally:
            os.close(descriptor)
        return [entry.name for entry in names]

    def write(self, name: str, raw: bytes, sync: bool = True) -> None:
        """Write as `write_pieces` does. Raises as `check_stored`, but with sync=False."""
        self.write_pieces(name, [raw], sync)
        if sync and not self.local:
            self.check_stored(name)

    def write_pieces(self, name: str, pieces: Iterable[Buffer], sync: bool = True) -> None:
        """Write a whole file in place of the one that is there: by fsync and a rename, or by one put of a store.

        sync=False: without fsync, for a file that is written often and that a power cut may take.
        """
        with self.named_errors():
            if self.local:
                write_below(self.root, name, pieces, sync=sync)
            else:
                self.fs.pipe_file(self.path(name), b"".join(pieces))

    def create(self, name: str, raw: bytes) -> bool:
        """Write a small file. False if it is there already, as far as the store can tell. Raises as `check_stored`."""
        with self.named_errors():
            try:
                if self.local:
                    write_below(self.root, name, [raw], create=True)
                    return True
                try:
                    self.fs.pipe_file(self.path(name), raw, mode="create")
                except (TypeError, ValueError, NotImplementedError):  # a client without conditional puts
                    self.fs.pipe_file(self.path(name), raw)
            except FileExistsError:
                return False
            self.check_stored(name)
        return True

    def check_stored(self, name: str) -> None:
        """Raise Incomplete unless the store has what it has just taken: its presence decides something."""
        self.fs.invalidate_cache()
        path = self.path(name)
        with self.named_errors():
            if not self.fs.exists(path):
                where = f"{self.key}={path}"
                raise Incomplete(f"{where} is not there, and the store had taken it: try again")

    def open_to_append(self, name: str) -> int:
        """The descriptor of a local file. Raises NotPlain and OSError."""
        return open_below(self.root, name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


class ModelFolder(Folder):
    """A folder with files of a model or a tokenizer: `names`. url: its own, or a model of the hub, OWNER/NAME."""

    def __init__(self, url: str, key: str, names: Sequence[str]) -> None:
        super().__init__(hub_folder(url, key, names), key)
        self.names, self.url = names, url
        self.shown = f"{key}={self.url}"

    def files(self, most: int) -> dict[str, bytes]:
        """Its files that are there, by name; or, as "", the one file that the URL itself names."""
        with self.named_errors():
            if self.fs.isdir(self.root):
                return {name: raw for name in self.names if (raw := self.read(name, most)) is not None}
            # A user's own path may be a link.
            own = os.path.split(os.path.realpath(self.root))
            with os.fdopen(open_below(*own), "rb") if self.local else self.fs.open(self.root) as file:
                return {"": self._bounded("", file.read(most + 1), most)}
