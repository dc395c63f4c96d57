"""Who may write: each attempt of a run claims its number by creating a file, `<run.dir>/attempts/00007.json`.

A claim says from which snapshot the attempt goes on. So a reader can tell what follows from what: an attempt that was
still writing when a newer one had started (a preempted node that wakes up) decides nothing any more.
"""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

from mingpt.atomic import write_whole
from mingpt.errors import Superseded
from mingpt.plainfile import check_all_plain
from mingpt.redact import without_secrets
from mingpt.storage import is_local, open_fs, place

CLAIM = re.compile(r"([0-9]{5,})\.json")
SEGMENT = re.compile(r"attempt-([0-9]{5,})\.jsonl")  # of metrics: one an attempt
VISIBLE_SECONDS = 10  # NFS clients remember for a few seconds that a file was not there
TRAIN, REWIND = "train", "rewind"


@dataclass(frozen=True)
class Record:
    """What a claim says. from_step, from_digest, parent: the snapshot that it goes on from, and the number of the
    attempt that wrote that (0, None, 0: there is none). by: TRAIN or REWIND. dropped: batches (first, end) that no step
    shows after this rewind.
    """

    number: int
    id: str = ""
    from_step: int = 0
    from_digest: str | None = None
    parent: int = 0
    by: str = TRAIN
    dropped: tuple[int, int] | None = None


def _names(run_dir: str, folder: str, pattern: "re.Pattern[str]") -> dict[int, str]:
    """The path of each numbered file in a folder of the run."""
    fs, root = open_fs(run_dir, "run.dir")
    fs.invalidate_cache()
    path = f"{root.rstrip('/')}/{folder}"
    with place("run.dir", run_dir):
        try:
            if is_local(fs):
                check_all_plain(path, "run.dir")
            paths = fs.ls(path, detail=False)
        except FileNotFoundError:
            return {}
    return {int(m[1]): p for p in sorted(paths) if (m := pattern.fullmatch(Path(p).name))}


def segments(run_dir: str) -> dict[int, str]:
    """The path of each attempt's metrics."""
    return _names(run_dir, "metrics", SEGMENT)


def newest_number(run_dir: str) -> int:
    """The number of the newest attempt; 0 if there was none."""
    return max([*_names(run_dir, "attempts", CLAIM), *segments(run_dir)], default=0)


def records(run_dir: str) -> dict[int, Record]:
    """What each attempt has claimed, by number. A claim that can't be read says nothing, and is left out."""
    return {n: r for n, path in _names(run_dir, "attempts", CLAIM).items() if (r := _read(run_dir, n, path))}


def _read(run_dir: str, number: int, path: str) -> Record | None:
    fs, _ = open_fs(run_dir, "run.dir")
    with place("run.dir", run_dir):
        try:
            raw: bytes = fs.cat_file(path)
        except FileNotFoundError:
            return None
    try:
        said: Any = json.loads(raw)
        identity, step, digest, parent, by = (said[k] for k in ("id", "from_step", "from_digest", "parent", "by"))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    good = isinstance(identity, str) and isinstance(digest, str | None) and by in (TRAIN, REWIND)
    if not good or type(step) is not int or type(parent) is not int:
        return None
    dropped = said.get("dropped")
    if dropped is not None:
        if (
            not isinstance(dropped, list)
            or [type(n) for n in dropped] != [int, int]
            or not 0 <= dropped[0] < dropped[1]
        ):
            return None
        dropped = (dropped[0], dropped[1])
    return Record(number, identity, step, digest, parent, by, dropped)


@dataclass(frozen=True)
class Attempt:
    """An attempt's own claim."""

    run_dir: str
    record: Record

    @property
    def number(self) -> int:
        return self.record.number

    @classmethod
    def claim(
        cls,
        run_dir: str,
        from_step: int,
        from_digest: str | None,
        parent: int = 0,
        by: str = TRAIN,
        above: int = 0,
        dropped: tuple[int, int] | None = None,
    ) -> "Attempt":
        """Take the next free number, above that of every attempt that is known. Called by one process.

        Two attempts that start at once get two numbers. On a store that does not heed conditional puts both may take
        one: the last to write has it, and the other one reads that before its first commit.
        """
        number = max(newest_number(run_dir), parent, above)  # run.dir may be a new one, and the snapshots elsewhere
        while True:
            number += 1
            record = Record(number, uuid4().hex, from_step, from_digest, parent, by, dropped)
            if _create(run_dir, record):
                return cls(run_dir, record)

    def overtaken(self) -> Record | None:
        """The newest attempt, if that is not this one."""
        found = _names(self.run_dir, "attempts", CLAIM)
        number = max(found, default=0)
        newest = _read(self.run_dir, number, found[number]) if found else None
        if number > self.number:
            return newest or Record(number)
        return newest if newest and number == self.number and newest.id != self.record.id else None

    def check(self) -> None:
        """Raise Superseded if a newer attempt has started."""
        newest = self.overtaken()
        if newest is None:
            return
        what = "the run was rewound" if newest.by == REWIND else f"attempt {newest.number} has started"
        raise Superseded(
            f"run.dir={without_secrets(self.run_dir)}: {what} while this attempt, number {self.number}, was still "
            f"training: this one ends here, and the newer one goes on; two runs need two places"
        )


@dataclass(frozen=True)
class RunRecord:
    """What is written beside the state: by which attempt, and what each of its manifests says of the run.

    claim: in rank 0. provenance: run, vocabulary, config, fingerprint, history.
    """

    attempt: int
    claim: Attempt | None
    provenance: Mapping[str, Any]


def _path(root: str, number: int) -> str:
    return f"{root.rstrip('/')}/attempts/{number:05d}.json"


def _create(run_dir: str, record: Record) -> bool:
    """False: this number is taken."""
    fs, root = open_fs(run_dir, "run.dir")
    path = _path(root, record.number)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    said: Mapping[str, Any] = {
        "id": record.id, "by": record.by, "at": now, "from_step": record.from_step, "from_digest": record.from_digest,
        "parent": record.parent,
    }  # fmt: skip
    raw = json.dumps(said if record.dropped is None else {**said, "dropped": record.dropped}).encode()
    with place("run.dir", run_dir):
        try:
            if is_local(fs):
                write_whole(Path(path), [raw], create=True)
            else:
                try:
                    fs.pipe_file(path, raw, mode="create")
                except (TypeError, ValueError, NotImplementedError):  # a client without conditional puts
                    fs.pipe_file(path, raw)
        except FileExistsError:
            return False
    return True


def is_visible(run_dir: str, number: int) -> bool:
    """Whether this process sees the claim that rank 0 has just made, at the latest after some time."""
    fs, root = open_fs(run_dir, "run.dir")
    deadline = time.monotonic() + VISIBLE_SECONDS
    while True:
        fs.invalidate_cache()
        with place("run.dir", run_dir):
            if fs.exists(_path(root, number)):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
