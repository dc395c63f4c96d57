"""The files that SOURCES name: their URLs, what they hold, and what tells one version of a file from another."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from mingpt import hub
from mingpt.errors import UserError
from mingpt.prepare.lists import expanded
from mingpt.redact import printable, without_secrets
from mingpt.storage import name_of, open_fs, place, without_query

Form = Literal["text", "jsonl", "parquet"]
FORMS: dict[str, Form] = {
    **dict.fromkeys(("txt", "text", "md"), "text"),
    **dict.fromkeys(("jsonl", "ndjson", "json"), "jsonl"),
    **dict.fromkeys(("parquet", "pq"), "parquet"),
}
AT_ONCE = 16  # files whose stores are asked at a time
COMPRESSED = {"gz": "gzip", "bz2": "bz2", "xz": "xz"}
# The entries of fsspec's `info` that change with a file's content, under the names that the stores' clients give them.
VERSION_KEYS = (
    "mtime", "LastModified", "last_modified", "Last-Modified", "updated", "modified", "ETag", "etag", "Content-MD5",
    "md5Hash", "generation", "VersionId", "blob_id",
)  # fmt: skip


@dataclass(frozen=True)
class File:
    """version: the store's times and ETags, which change with the content; empty if the store gives none."""

    url: str
    form: Form
    size: int
    version: str = ""

    @property
    def shown(self) -> str:
        return printable(str(without_secrets(self.url)))


def find_files(sources: Sequence[str], form: Form | None, commits: dict[str, str]) -> list[File]:
    """The files that URLs, globs and lists name, each once, in the order of the sources; those of a glob are sorted.

    form: of all files; None: as their names end. commits: see hub.pinned. Raises UserError if a source names no file,
    or one of unknown form.
    """
    found: dict[str, File] = {}
    with ThreadPoolExecutor(AT_ONCE) as pool:  # a web server is asked for the size of each file
        for file in pool.map(lambda named: named(), _named(list(expanded(sources)), form, commits)):
            found.setdefault(file.url, file)
    return list(found.values())


def _named(sources: Sequence[str], form: Form | None, commits: dict[str, str]) -> Iterator[Callable[[], File]]:
    """For each file that the sources name, a call that asks its store for the rest."""
    for source in sources:
        fs, path = open_fs(source, "SOURCES")
        shown = f"SOURCES={without_secrets(source)}"
        with place("SOURCES", source):
            url = source
            if source.startswith(hub.SCHEME):
                try:
                    url = hub.pinned(fs, path, commits)
                except (ValueError, NotImplementedError) as error:
                    raise UserError(f"{shown}: not hf://datasets/OWNER/NAME[@REVISION]/FILES: {error}") from error
                path = url.removeprefix(hub.SCHEME)
            if any(c in without_query(path) for c in "*?[") and not fs.exists(path):
                urls = {p: fs.unstrip_protocol(p) for p in sorted(fs.glob(path)) if not fs.isdir(p)}
            else:
                urls = {path: url}
            if not urls:
                raise UserError(f"{shown}: no file is there: check the spelling")
        yield from (partial(_file, fs, p, url, form, source) for p, url in urls.items())


def _file(fs: Any, path: str, url: str, form: Form | None, source: str) -> File:
    shown = f"SOURCES={without_secrets(source)}"
    with place("SOURCES", source):
        info = fs.info(path)
    if info["type"] == "directory":
        raise UserError(f"{shown}: a folder: name the files in it, as in {url.rstrip('/')}/*.txt")
    return File(url, form or _form_of(path, shown), info["size"] or 0, _version_of(info))


def _form_of(path: str, shown: str) -> Form:
    parts = name_of(path).lower().split(".")
    suffix = parts[-2] if parts[-1] in COMPRESSED and len(parts) > 2 else parts[-1]
    if suffix not in FORMS:
        raise UserError(f"{shown}: unknown form .{printable(suffix)}: give --form text, jsonl or parquet")
    return FORMS[suffix]


def _version_of(info: Mapping[str, Any]) -> str:
    known = [[key, str(info[key])] for key in VERSION_KEYS if info.get(key)]
    return json.dumps(known or [["created", str(info["created"])]]) if known or info.get("created") else ""


def identity_of(url: str) -> str:
    """The part of a URL that identifies the file in its folder.

    After a name such as `a.txt`, a query may be a signature, which changes from day to day, and is left out. A URL such
    as `download?id=7` has no such name: its query belongs to the identity.
    """
    path, name = without_query(url), name_of(url)
    suffixes = set(name.lower().split(".")[1:])
    return name if suffixes & (FORMS.keys() | COMPRESSED.keys()) else name + url[len(path) :]
