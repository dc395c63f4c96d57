"""A finished data set: what it was made of, and whether a second `mingpt prepare` would write the same."""

import json
from collections.abc import Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from mingpt.cli.console import say
from mingpt.data.dataset import MANIFEST, DataSet, from_bytes
from mingpt.errors import UserError
from mingpt.files.folder import Folder
from mingpt.prepare.documents import Options, blocks
from mingpt.prepare.shardwriter import PROGRESS, SOURCES
from mingpt.prepare.sources import File


def _read(raw: bytes | None) -> dict[str, Any]:
    """A JSON object that may be damaged, or a stranger's; empty if it is none."""
    try:
        found = json.loads(raw or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def commits_of(folder: Folder, home: Path) -> dict[str, str]:
    """The commits that an earlier `mingpt prepare` has read, finished or not: the next one reads the same."""
    progress = Folder(str(home), "--out").read(PROGRESS)
    commits = _read(folder.read(SOURCES) if progress is None else progress).get("commits")
    return {str(k): str(v) for k, v in commits.items()} if isinstance(commits, dict) else {}


def finished(folder: Folder, files: Sequence[File], options: Options, plan: str, versions: str) -> DataSet | None:
    """The finished data set in a folder, if it was made from the same sources and options; None if it has to be made.

    versions: a hash of the sources' times and ETags; empty if a store gives none. Then, or if they have changed, the
    sources are read to compare their contents. Raises UserError if another data set is there.
    """
    if not (there := folder.read(MANIFEST)):
        return None
    shown = folder.shown
    dataset = from_bytes(there, shown)
    recorded = _read(folder.read(SOURCES))
    if not versions or (recorded.get("made_from"), recorded.get("versions")) != (dataset.made_from, versions):
        say(f"prepare: {shown}: a data set is there; reading the sources to see whether it was made of them")
        content, taken = "", recorded.get("blocks")
        every = blocks(files, options)
        for block in islice(every, taken if isinstance(taken, int) and taken > 0 else None):
            content = hash_of(content, block.pieces)
        if hash_of(plan, content) != dataset.made_from:
            raise UserError(
                f"{shown}: another data set is there, of other sources or options, or of these before they changed: "
                "choose another folder"
            )
    sizes, width = {name: entry["size"] for name, entry in folder.entries().items()}, np.dtype(dataset.dtype)
    if not (lost := [s.name for s in dataset.shards if sizes.get(s.name) != s.tokens * width.itemsize]):
        say(f"prepare: {shown}: already there, made of these sources")
        return dataset
    say(f"prepare: {shown}: missing or of another size: {', '.join(lost)}: the data set is made again")
    return None


def hash_of(*parts: Any) -> str:
    return sha256(json.dumps(parts).encode()).hexdigest()
