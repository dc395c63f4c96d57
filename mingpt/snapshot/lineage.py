"""What follows from what: which durable snapshots are on the run's line, and which hot ones continue it.

The newest snapshot is not simply that of the highest step. An attempt that a newer one has overtaken may still commit
(a preempted node that was uploading), a person may have gone back to an older step, and a node's memory may hold what
nobody wants any more. A restart must bring none of that back.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mingpt.atomic import write_whole
from mingpt.config.affecting import settings
from mingpt.errors import Damaged, OtherFormat, Unreadable
from mingpt.snapshot.attempts import REWIND, Record
from mingpt.snapshot.files import OVERTAKEN
from mingpt.snapshot.format import MANIFEST, Manifest
from mingpt.snapshot.reader import look
from mingpt.snapshot.store import Store
from mingpt.storage import place

NOTE = "follows.json"


def peek(store: Store, step: int) -> Manifest | None:
    """The manifest, or None if it can't be read: that is told when the snapshot is."""
    try:
        return look(store, step)
    except (Damaged, OtherFormat, Unreadable):
        return None


def overtaken(store: Store, records: Mapping[int, Record]) -> list[int]:
    """The steps, newest first, that are not on the run's line.

    They were committed by an attempt after a newer one had gone on from an earlier step and had committed snapshots of
    its own; or after somebody had rewound the run to an earlier step. (Where the newer one has committed nothing, what
    the older one did late is no work of anybody else's, and stays.)
    """
    off: list[int] = []
    best, at, passed = 0, 0, list[int]()  # the newest attempt found so far, its newest step, and its others
    rewinds = {n: r for n, r in records.items() if r.by == REWIND}
    for step in store.steps():
        if best and step <= _from(records, best) and not _began_below(records, best, at):
            break  # usual: the newest snapshot is the newest attempt's, and little more is read
        if (manifest := peek(store, step)) is None:
            continue
        # Somebody who went back to a snapshot has made it one of the rewind's.
        chosen = (n for n, r in rewinds.items() if (r.from_step, r.from_digest) == (step, manifest.digest))
        attempt = max(manifest.attempt, *chosen, 0)
        if _began_below(rewinds, attempt, step) or (attempt < best and step > _from(records, best)):
            off.append(step)
        elif attempt > best:
            off += [s for s in (at, *passed) if s]
            best, at, passed = attempt, step, []
        else:
            passed.append(step)
    return sorted(off, reverse=True)


def _began_below(records: Mapping[int, Record], attempt: int, step: int) -> bool:
    """Whether a newer attempt has gone on from an earlier step."""
    return any(number > attempt and record.from_step < step for number, record in records.items())


def _from(records: Mapping[int, Record], attempt: int) -> int:
    return records[attempt].from_step if attempt in records else 0


def set_overtaken_aside(store: Store, records: Mapping[int, Record], say: Callable[[str], None]) -> None:
    """Called by one process, at a start."""
    for step in overtaken(store, records):
        with place(store.key, store.url):
            name = store.set_aside(step, OVERTAKEN)
        say(
            f"the snapshot of step {step} in {store.url} was committed by an attempt that a newer one had overtaken: "
            f"set aside (its manifest is now {name})"
        )


@dataclass(frozen=True)
class Newest:
    """The newest durable snapshot on the run's line, for a node that looks into its memory. step 0: there is none.

    attempt: who wrote it. result: all that its bits follow from. unreadable: steps above it that are damaged.
    rewound: the number of the last rewind, which is an attempt; 0: none.
    """

    step: int = 0
    digest: str | None = None
    attempt: int = 0
    result: Any = None
    unreadable: tuple[int, ...] = ()
    rewound: int = 0

    @classmethod
    def of(cls, store: Store, records: Mapping[int, Record] = MappingProxyType({})) -> "Newest":
        rewound = max((n for n, record in records.items() if record.by == REWIND), default=0)
        unreadable: list[int] = []
        for step in store.folders():
            if manifest := peek(store, step):
                return cls(step, manifest.digest, manifest.attempt, _result(manifest), tuple(unreadable), rewound)
            if any(f.name == MANIFEST or f.was_damaged for f in store.files(step)):  # not one that was never committed
                unreadable.append(step)
        return cls(unreadable=tuple(unreadable), rewound=rewound)


def _result(manifest: Manifest) -> Any:
    values, affecting = settings(manifest.config)
    result = [{key: values.get(key) for key in sorted(affecting)}, manifest.fingerprint]
    return json.loads(json.dumps(result))  # as it is after its way through a message


@dataclass(frozen=True)
class Follows:
    """A note beside hot snapshots: the newest durable one that they continue (step 0: none), and who says so."""

    attempt: int
    step: int
    digest: str | None

    def write(self, hot: Store) -> None:
        with place(hot.key, hot.url):
            write_whole(Path(hot.root) / NOTE, [json.dumps(asdict(self)).encode()])

    @classmethod
    def read(cls, hot: Store) -> "Follows | None":
        try:
            return cls(**json.loads((Path(hot.root) / NOTE).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None


def strangers(hot: Store, newest: Newest) -> list[int]:
    """The steps in a node's memory that do not continue what is durable now."""
    note = Follows.read(hot)
    return [step for step in hot.steps() if not _continues(hot, step, note, newest)]


def _continues(hot: Store, step: int, note: Follows | None, newest: Newest) -> bool:
    if note is None or note.attempt < newest.rewound:
        return False
    if newest.step < note.step:  # what it grew from was deleted; damage is no such wish
        return note.step in newest.unreadable
    if newest.step == note.step:
        return newest.digest == note.digest
    # Something newer is durable. It is of the same line if the same attempt wrote it, or if it has the same bits.
    if newest.attempt == note.attempt:
        return True
    manifest = peek(hot, step)
    return manifest is None or newest.result == _result(manifest)
