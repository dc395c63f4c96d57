"""The files that SOURCES name: their URLs, what they hold, and what tells one version of a file from another."""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from mingpt.cli.console import printable
from mingpt.errors import UserError
from mingpt.files import hub
from mingpt.files.storage import name_of, open_fs, place, without_query

# What a file can hold, and how its name tells that. `mingpt prepare --form` takes the same words.
Form = Literal["text", "jsonl", "csv", "parquet"]
FORMS: dict[str, Form] = {
    "txt": "text", "text": "text", "md": "text", "jsonl": "jsonl", "ndjson": "jsonl", "json": "jsonl", "csv": "csv",
    "parquet": "parquet", "pq": "parquet",
}  # fmt: skip
PACKED = {"gz", "zst"}
AT_ONCE = 16  # files whose stores are asked at a time
# The entries of fsspec's `info` that change with a file's content, under the names that the stores' clients give them.
VERSION_KEYS = (
    "mtime", "LastModified", "last_modified", "Last-Modified", "updated", "modified", "ETag", "etag", "Content-MD5",
    "md5Hash", "generation", "VersionId", "blob_id",
)  # fmt: skip


@dataclass(frozen=True)
class File:
    """version: the store's times and ETags, which change with the content; empty if the store gives none. packed: the
    end of its name, if it is compressed.
    """

    url: str
    form: Form
    size: int
    version: str = ""
    packed: str = ""

    @property
    def shown(self) -> str:
        return printable(self.url)


def find_files(sources: Sequence[str], form: Form | None, commits: dict[str, str]) -> list[File]:
    """The files that URLs and globs name, each once, in the order of the sources; those of a glob are sorted.

    form: of all files; None: as their names end. commits: see hub.pinned. Raises UserError if a source names no file,
    or one of unknown form.
    """
    named = [found for source in sources for found in _named(source, commits)]
    with ThreadPoolExecutor(AT_ONCE) as pool:  # a web server is asked for the size of each file
        return list({file.url: file for file in pool.map(lambda found: _file(form, *found), named)}.values())


def _named(source: str, commits: dict[str, str]) -> list[tuple[str, Any, str, str]]:
    """The source, the file system, path and URL of each file that a source names."""
    fs, path = open_fs(source, "SOURCES")
    shown, url = f"SOURCES={source}", source
    with place("SOURCES", source):
        if source.startswith(hub.SCHEME):
            try:
                url = hub.pinned(fs, path, commits)
            except (ValueError, NotImplementedError) as error:
                raise UserError(f"{shown}: not hf://datasets/OWNER/NAME[@REVISION]/FILES: {error}") from error
            path = url.removeprefix(hub.SCHEME)
        if not any(c in without_query(path) for c in "*?[") or fs.exists(path):
            return [(source, fs, path, url)]
        paths = [p for p in sorted(fs.glob(path)) if not fs.isdir(p)]
    if not paths:
        raise UserError(f"{shown}: no file is there: check the spelling")
    return [(source, fs, p, fs.unstrip_protocol(p)) for p in paths]


def _file(form: Form | None, source: str, fs: Any, path: str, url: str) -> File:
    shown = f"SOURCES={source}"
    with place("SOURCES", source):
        info = fs.info(path)
    if info["type"] == "directory":
        raise UserError(f"{shown}: a folder: name the files in it, as in {url.rstrip('/')}/*.txt")
    *_, suffix, last = f".{name_of(path).lower()}".split(".")
    suffix, packed = (suffix, last) if last in PACKED else (last, "")
    if not form and suffix not in FORMS:
        raise UserError(f"{shown}: unknown form .{printable(suffix)}: give --form text, jsonl, csv or parquet")
    return File(url, form or FORMS[suffix], info["size"] or 0, _version_of(info), packed)


def _version_of(info: Mapping[str, Any]) -> str:
    known = [[key, str(info[key])] for key in VERSION_KEYS if info.get(key)]
    return json.dumps(known or [["created", str(info["created"])]]) if known or info.get("created") else ""


def identity_of(url: str) -> str:
    """The part of a URL that identifies the file in its folder.

    After a name such as `a.txt`, a query may be a signature, which changes from day to day, and is left out. A URL such
    as `download?id=7` has no such name: its query belongs to the identity.
    """
    path, name = without_query(url), name_of(url)
    return name if set(name.lower().split(".")[1:]) & (FORMS.keys() | PACKED) else name + url[len(path) :]
