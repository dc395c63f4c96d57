"""The snapshots under one fsspec URL: list, read, write, commit, set aside, delete.

The manifest commits a snapshot. Without it readers ignore the folder, so what a killed writer left does no harm. A
part's name has the hash of its content, so two writers of one step can only write the same bytes under one name.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

from mingpt.errors import Damaged, Incomplete, Unreadable, UserError
from mingpt.files.folder import Folder
from mingpt.files.localfile import Buffer, NotPlain, check_file, check_folder, sync_folder
from mingpt.files.storage import is_mismatch, modified, unmasked, words_of
from mingpt.snapshot.format import MANIFEST, PART_NAME, Manifest
from mingpt.snapshot.manifest import MANIFEST_LIMIT, encode_manifest
from mingpt.snapshot.pieces import read_pieces, room_for

STEP_FOLDER = re.compile(r"step-([0-9]{9}|[1-9][0-9]{9})")  # train.max_steps goes to 2^31 - 1
SNAPSHOTS, METRICS = "snapshots", "metrics"  # folders in a run's directory
PROBE, SET_ASIDE = ".probe-", "set-aside-"
REWOUND, OVERTAKEN = "rewound-", "overtaken-"  # in its manifest's name: why a good snapshot was set aside


def step_name(step: int) -> str:
    return f"step-{step:09d}"


@dataclass(frozen=True)
class File:
    """A file in a step's folder, or beside the steps' folders."""

    step: int | None  # None: beside the steps' folders
    name: str
    size: int | None  # in bytes; None if the store does not report it, as `modified`
    modified: float | None  # Unix time
    upload: str | None = None  # the identity of a multipart upload that is not finished; then there is no file yet

    @property
    def path(self) -> str:
        """Relative to the store's URL."""
        return self.name if self.step is None else f"{step_name(self.step)}/{self.name}"

    @property
    def is_temporary(self) -> bool:
        return self.name.startswith(".") and self.name.endswith(".tmp")

    @property
    def is_set_aside(self) -> bool:
        return self.name.startswith(SET_ASIDE) and self.name.endswith(MANIFEST)

    @property
    def was_damaged(self) -> bool:
        """Whether this is the manifest of a snapshot that was set aside as damaged, and not as rewound or overtaken."""
        return self.is_set_aside and not self.name.startswith((SET_ASIDE + REWOUND, SET_ASIDE + OVERTAKEN))

    @property
    def was_rewound(self) -> bool:
        return self.is_set_aside and self.name.startswith(SET_ASIDE + REWOUND)

    @property
    def is_ours(self) -> bool:
        """Whether this program may have put it into a step's folder."""
        # What a user has put there is never deleted as a leftover.
        return PART_NAME.fullmatch(self.name) is not None or self.is_temporary or self.is_set_aside


class Store(Folder):
    """The snapshots under one URL. key: the config key or argument that names the URL, for messages.

    Methods raise what `storage.place` makes of errors, and those about one file the errors of fsspec's client. For a
    link inside a run's directory they raise UserError.
    """

    def __init__(self, url: str, key: str = "snapshot.dir") -> None:
        super().__init__(url, key)
        if "http" in self.fs.protocol:
            raise UserError(f"{self.shown}: snapshots are read from disks and buckets: copy the folder to one")

    @property
    def run_dir(self) -> str:
        """The run's directory, for a store in its usual place; else the store's own URL. May hold secrets."""
        return self.url.removesuffix(f"/{SNAPSHOTS}")

    def folder(self, step: int) -> str:
        return self.path(step_name(step))

    def folder_url(self, step: int) -> str:
        """For messages."""
        return f"{self.url}/{step_name(step)}"

    def _name(self, step: int | None, name: str = "") -> str:
        """The name of a file or of a step's folder (None: the store's own), below the store.

        Raises UserError if that folder is a link, which may lead outside the run. A link that the user names as the
        store's URL is fine, but not one named `snapshots` or `metrics`: those are names inside a run's directory, which
        may come from somebody else.
        """
        folder = "" if step is None else step_name(step)
        if self.local:
            with self.named_errors():
                if Path(self.root).name in (SNAPSHOTS, METRICS):
                    check_folder(self.root)
                if folder:
                    check_folder(self.path(folder))
        return "/".join(filter(None, (folder, name)))

    def _file(self, step: int | None, name: str = MANIFEST) -> str:
        """The path of a file. Raises as `_name`."""
        return self.path(self._name(step, name))

    def steps(self) -> list[int]:
        """The committed steps, newest first."""
        with self.named_errors():
            return [step for step in self.folders() if self.is_committed(step)]

    def is_committed(self, step: int) -> bool:
        self.fs.invalidate_cache()  # another process may have committed or deleted it since the last listing
        try:
            return bool(self.fs.exists(f"{self.folder(step)}/{MANIFEST}"))
        except Exception:  # of any client
            # It may be about this one object, and then its folder can still be listed; else the listing raises, too.
            return MANIFEST in self.entries(self._name(step))

    def folders(self) -> list[int]:
        """The steps that have a folder, committed or not, newest first."""
        steps = list[int]()
        for name in self.entries(self._name(None)):
            if named := STEP_FOLDER.fullmatch(name):
                steps.append(int(named[1]))
                self._name(steps[-1])  # a link in place of a step's folder is refused here, before anything reads it
        return sorted(steps, reverse=True)

    def files(self, step: int | None) -> list[File]:
        """The files in a step's folder (None: beside the steps' folders), without folders."""
        files = list[File]()
        for name, entry in self.entries(self._name(step)).items():
            if entry["type"] != "directory":
                # The size of a link, a FIFO or a device means nothing. `size` refuses those.
                size = entry.get("size") if entry["type"] == "file" else None
                files.append(File(step, name, size, modified(entry)))
        return files

    def size(self, step: int | None, name: str) -> int:
        """In bytes. Raises Damaged if the file is missing, and for a link, a FIFO or a device."""
        path = self._file(step, name)
        with self._as_damage(name, step):
            if self.local:
                return check_file(path).st_size
            self.fs.invalidate_cache()  # adlfs would answer from a listing that is older than our own write
            size = self.again(lambda: self.fs.info(path))["size"]  # not adlfs's `size`, which has no time limit
        if not isinstance(size, int):
            raise Damaged(f"{name}: its server does not report its size")
        return size

    def check_size(self, step: int, name: str, size: int) -> None:
        """Raise Damaged unless the file is there with this size."""
        if (actual := self.size(step, name)) != size:
            raise Damaged(f"{name} has {actual} bytes in place of {size}")

    def read_part(self, step: int, name: str, size: int) -> memoryview:
        """A file of `size` bytes. Raises Damaged (before reading, for another size) and Unreadable."""
        content, end = room_for(size), 0
        for piece in self.read_pieces(step, name, size):
            content[end : end + len(piece)] = piece
            end += len(piece)
        return content

    def read_pieces(self, step: int, name: str, size: int) -> Iterator[memoryview]:
        """The same, piece by piece; each is valid until the next. Needs little memory for a file of any size."""
        # The size is asked before ranges: some S3 servers refuse a range beyond the end, S3 and Azure any of an empty
        # file. And a damaged manifest can't make a reader take more memory than there are bytes.
        self.check_size(step, name, size)
        with self._as_damage(name, step):
            yield from read_pieces(self, self._name(step, name), size)

    @contextmanager
    def _as_damage(self, name: str, step: int | None) -> Iterator[None]:
        """Turn what is wrong with a file that the manifest names into Damaged, or Unreadable if it can't be had."""
        try:
            yield
        except NotPlain as problem:
            raise Damaged(f"{name} {problem}") from problem
        except EOFError as error:
            raise Damaged(f"{name} has become shorter while it was read") from error
        except Exception as error:
            # A client's own checksums see damage before ours do. As a store's error (exit code 70) it would come back
            # with each start; as damage it makes the next older snapshot be tried.
            if isinstance(unmasked(error), FileNotFoundError):
                raise Damaged(f"{name} is missing") from error
            if is_mismatch(error):
                raise Damaged(f"{name}: its bytes are not those that were stored ({words_of(error)})") from error
            self.raise_unreadable(self._name(step, name), error)
            raise

    def read_manifest(self, step: int, name: str = MANIFEST) -> bytes:
        """At most MANIFEST_LIMIT bytes come into memory, whatever the server sends. Raises Damaged for more."""
        size = self.size(step, name)
        if size > MANIFEST_LIMIT:
            raise Damaged(f"{name} is larger than {MANIFEST_LIMIT} bytes")
        with self._as_damage(name, step):
            return b"".join(bytes(piece) for piece in read_pieces(self, self._name(step, name), size))

    def write_part(self, step: int, name: str, content: Iterable[Buffer]) -> None:
        self.write_pieces(self._name(step, name), content)

    def share(self, source: "Store", step: int, name: str) -> bool:
        """Have a file of another store here, too, while its bytes stay where they are: by a hard link, or by a copy
        that the object store itself makes. False where that can't be: on another disk, or in another store.
        """
        old, new = source._file(step, name), self._file(step, name)
        if not (self.local and source.local):
            if self.fs != source.fs:
                return False
            self.fs.cp_file(old, new)
            return True
        Path(new).parent.mkdir(parents=True, exist_ok=True)
        # Under another name first, since link(2) can't replace a file that is there.
        temporary = Path(new).with_name(f".{name}.{uuid4().hex}.tmp")
        try:
            os.link(old, temporary, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:  # another disk, or one that has no hard links, or as many as it can have
            return False
        try:
            os.replace(temporary, new)
        finally:
            temporary.unlink(missing_ok=True)  # a rename onto the same file leaves both names
        return True

    def commit(self, manifest: Manifest) -> bool:
        """Write the manifest, after all parts. False: the step has a manifest already, which stays.

        So an attempt that wakes up late (a preempted node that was still uploading) replaces nothing. A store without
        conditional puts can't promise that. Raises Incomplete, with the manifest set aside, if a part is gone by now
        (somebody's prune may have taken it for a dead writer's, until the manifest was there), or the manifest, which a
        store may have dropped.
        """
        raw = encode_manifest(manifest)
        # The first to commit a step has the word: two runs on one run.dir had both said "finished", with other digests.
        if not self.create(self._name(manifest.step, MANIFEST), raw):
            return False
        if self.local:
            # Files and their own folder are on the disk; after a power cut the step's folder could still be missing.
            sync_folder(Path(self.root))  # the entry of the step's folder
        try:
            self.check_parts(manifest, [(MANIFEST, len(raw))])
        except Incomplete:
            with suppress(FileNotFoundError):
                self.set_aside(manifest.step)
            raise
        return True

    def check_parts(self, manifest: Manifest, more: Iterable[tuple[str, int]] = ()) -> None:
        """Raise Incomplete unless every part is there with its size; more: other files, and their sizes."""
        try:
            self.check_sizes(manifest.step, manifest.sizes | dict(more))
        except Damaged as problem:
            raise Incomplete(
                f"{self.folder_url(manifest.step)}: {problem} after it was written; with several nodes, "
                f"{self.key} must be a place that all of them share"
            ) from problem

    def check_sizes(self, step: int, sizes: Mapping[str, int]) -> None:
        """Raise Damaged unless these files are there, with these sizes."""
        listed = {file.name: file.size for file in self.files(step)}
        for name, size in sizes.items():
            if listed.get(name) != size:
                # A listing may be stale: of what it does not show, the store is asked. Not of every part, though: each
                # costs a request.
                self.check_size(step, name, size)

    @cached_property
    def conditional_puts(self) -> bool:
        """Whether this store refuses to create a file that exists. Probed: some stores ignore the client's option."""
        if self.local:
            return True
        probe = self.path(f"{PROBE}{uuid4().hex}")  # if this is killed, retention knows it by its name
        with self.named_errors():
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
        """Take a commit back without deleting anything: rename the manifest. Returns the new name.

        why: REWOUND or OVERTAKEN, which becomes part of the name; "" for a damaged snapshot.
        """
        try:
            token = sha256(self.read_manifest(step)).hexdigest()
        except (Damaged, Unreadable):  # no content to hash; it must not replace one that was set aside before
            token = uuid4().hex
        name = f"{SET_ASIDE}{why}{token[:8]}-{MANIFEST}"
        # Its parts stay: with the manifest's own name they are a snapshot again.
        self._move(step, MANIFEST, name)
        return name

    def bring_back(self, step: int, name: str) -> None:
        """Commit again what `set_aside` has renamed to `name`. Raises FileExistsError if the step has another manifest.

        An object store copies and deletes. If this was killed between the two, the next call deletes.
        """
        old, new = self._file(step, name), self._file(step)
        if not self.fs.exists(new):
            return self._move(step, name, MANIFEST)
        if self.fs.cat_file(old) != self.read_manifest(step):
            raise FileExistsError(new)
        self.fs.rm_file(old)

    def _move(self, step: int, name: str, new: str) -> None:
        if self.local:
            os.rename(self._file(step, name), self._file(step, new))
        else:  # not the client's `mv`, which has no time limit with some of them
            self.fs.cp_file(self._file(step, name), self._file(step, new))
            self.check_stored(self._name(step, new))  # before the only other copy goes
            self.fs.rm_file(self._file(step, name))

    def delete(self, step: int) -> None:
        """Delete a step's folder with all that is in it. Another process may be deleting it, too.

        The manifest goes first, so a reader sees the whole snapshot or none.
        """
        folder = self.folder(step)
        with suppress(FileNotFoundError):
            self.fs.rm_file(self._file(step))
        self.fs.invalidate_cache()
        with suppress(FileNotFoundError):
            # Object stores: delete the objects alone. s3fs would delete the folder, too, which is no object; some
            # servers refuse that and delete nothing.
            self.fs.rm(folder if self.local else self.fs.find(folder), recursive=self.local)

    def remove(self, files: Iterable[File]) -> None:
        """Delete single files, and then their folders if those are empty; abort uploads. Another process may be doing
        the same.
        """
        folders = set()
        for file in files:
            with suppress(FileNotFoundError):
                if file.upload:
                    self.fs.call_s3("abort_multipart_upload", **self._key(file.path), UploadId=file.upload)
                else:
                    self.fs.rm_file(self._file(file.step, file.name))
            if file.step is not None:
                folders.add(self.folder(file.step))
        if self.local:
            for folder in folders:
                with suppress(OSError):  # not empty
                    os.rmdir(folder)

    def remove_parts(self, step: int) -> None:
        """Delete what a snapshot that failed has left in a step's folder."""
        files = self.files(step)
        # A manifest, also one that was set aside, may name these parts: the same bits have the same names.
        if not any(file.name.endswith(MANIFEST) for file in files):
            self.remove(file for file in files if file.is_ours)

    def unfinished_uploads(self) -> list[File]:
        """Up to 1,000 multipart uploads of parts that were never completed, such as those of killed writers. S3 keeps
        them for ever, shows them in no listing of files, and their bytes cost money.

        Empty if the store is not S3, or does not let us list them.
        """
        if not hasattr(self.fs, "call_s3"):
            return []
        where = self._key("step-")
        try:
            answer = self.fs.call_s3("list_multipart_uploads", Bucket=where["Bucket"], Prefix=where["Key"])
        except OSError:  # such as PermissionError: then a lifecycle rule of the bucket must remove them
            return []
        found = []
        for upload in answer.get("Uploads", ()):
            folder, _, name = upload["Key"].removeprefix(self._key("")["Key"]).partition("/")
            if PART_NAME.fullmatch(name) and (step := STEP_FOLDER.fullmatch(folder)):
                found.append(File(int(step[1]), name, None, upload["Initiated"].timestamp(), upload["UploadId"]))
        return found

    def _key(self, name: str) -> dict[str, str]:
        bucket, _, key = self.path(name).partition("/")
        return {"Bucket": bucket, "Key": key}
