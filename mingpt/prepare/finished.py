"""A finished data set: what it was made of, and whether a second `mingpt prepare` would write the same."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mingpt.console import say
from mingpt.data.dataset import DataSet, Shard, from_bytes, read_manifest
from mingpt.errors import UserError
from mingpt.prepare.documents import Options, blocks
from mingpt.prepare.shardwriter import PROGRESS, SOURCES
from mingpt.prepare.sources import File
from mingpt.redact import without_secrets

Stopped = tuple[int, int]  # where --tokens ended it: the number of the file, and how many of its blocks were read


@dataclass(frozen=True)
class Sources:
    """sources.json, beside the manifest. versions: a hash of the sources' times and ETags. commits: see hub.pinned."""

    made_from: str
    versions: str
    commits: dict[str, str] = field(default_factory=dict)
    stopped: Stopped | None = None

    def to_bytes(self) -> bytes:
        return json.dumps({name: value for name, value in asdict(self).items() if value}).encode()


def _read(raw: bytes | None) -> dict[str, Any]:
    """A JSON object that may be damaged, or a stranger's; empty if it is none."""
    try:
        found = json.loads(raw or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def commits_of(fs: Any, path: str, home: Path) -> dict[str, str]:
    """The commits that an earlier `mingpt prepare` has read, finished or not: the next one reads the same."""
    progress = home / PROGRESS
    begun = _read(progress.read_bytes()) if progress.is_file() else _read(read_manifest(fs, path, SOURCES))
    commits = begun.get("commits")
    return {str(k): str(v) for k, v in commits.items()} if isinstance(commits, dict) else {}


def finished(
    out: str, fs: Any, path: str, files: Sequence[File], options: Options, plan: str, versions: str
) -> DataSet | None:
    """The finished data set at `out`, if it was made from the same sources and options; None if it has to be made.

    versions: a hash of the sources' times and ETags; empty if a store gives none. Then, or if they have changed, the
    sources are read to compare their contents. Raises UserError if another data set is there.
    """
    if not (there := read_manifest(fs, path)):
        return None
    shown = f"--out={without_secrets(out)}"
    dataset = from_bytes(there, shown)
    recorded = _read(read_manifest(fs, path, SOURCES))
    if not versions or (recorded.get("made_from"), recorded.get("versions")) != (dataset.made_from, versions):
        say(f"prepare: {shown}: a data set is there; reading the sources to see whether it was made of them")
        if hash_of(plan, _content_of(files, options, recorded.get("stopped"))) != dataset.made_from:
            raise UserError(
                f"{shown}: another data set is there, of other sources or options, or of these before they changed: "
                "choose another folder"
            )
    if not (lost := [shard.name for shard in dataset.shards if not _is_there(fs, path, shard, dataset.dtype)]):
        say(f"prepare: {shown}: already there, made of these sources")
        return dataset
    say(f"prepare: {shown}: missing or of another size: {', '.join(lost)}: the data set is made again")
    return None


def _content_of(files: Sequence[File], options: Options, stopped: Any) -> str:
    """The hash that prepare made of what it read. stopped: where it ended; anything else than a Stopped: nowhere."""
    end, taken = stopped if isinstance(stopped, list) and [type(n) for n in stopped] == [int, int] else (len(files), 0)
    content = ""
    for number, file in enumerate(files[: end + 1]):
        last = ""
        for block in islice(blocks(file, options), taken if number == end else None):
            last = block.content
        content = hash_of(content, last)
    return content


def hash_of(*parts: Any) -> str:
    return sha256(json.dumps(parts).encode()).hexdigest()


def _is_there(fs: Any, path: str, shard: Shard, dtype: str) -> bool:
    file = f"{path.rstrip('/')}/{shard.name}"
    return fs.isfile(file) and fs.info(file)["size"] == shard.tokens * np.dtype(dtype).itemsize
