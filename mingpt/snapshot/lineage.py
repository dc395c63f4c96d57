"""Which durable snapshots belong to the run's line, and which hot snapshots continue it.

The newest snapshot is not simply that of the highest step. An overtaken attempt may commit late (a preempted node that
was still uploading). A person may have gone back to an older step. A node's memory may hold steps from before that. A
restart must not bring any of these back.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mingpt.config.affecting import settings
from mingpt.localfile import write_whole
from mingpt.snapshot.attempts import REWIND, Record, without_undone
from mingpt.snapshot.format import MANIFEST, Manifest
from mingpt.snapshot.reader import manifest_or_none
from mingpt.snapshot.store import OVERTAKEN, Store

NOTE = "follows.json"


def is_on(line: Mapping[int, tuple[int, int]], manifest: Manifest) -> bool:
    """Whether a snapshot is on a line of attempts. An attempt's own may be of the step that it continues: a fork's
    first one, and one that was only in a node's memory.
    """
    first, end = line.get(manifest.attempt, (manifest.step + 1, 0))
    return first <= manifest.step <= end


def overtaken(store: Store, records: Mapping[int, Record]) -> list[int]:
    """The committed steps, newest first, that are not on the run's line.

    A step is off the line if the attempt that wrote it is older than a rewind to an earlier step, or older than an
    attempt that continued from an earlier step. In the second case it stays while that attempt has committed nothing.
    """
    off: list[int] = []
    records = without_undone(records)
    best, at, passed = 0, 0, list[int]()  # the newest attempt found so far, its newest step, and its other steps
    rewinds = {n: r for n, r in records.items() if r.by == REWIND}
    for step in store.steps():
        if best and step <= _start_of(records, best) and not _newer_began_below(records, best, at):
            break  # usually at once: the newest snapshot is the newest attempt's
        if (manifest := manifest_or_none(store, step)) is None:
            continue
        # A snapshot that somebody has rewound to counts as the rewind's.
        chosen = (n for n, r in rewinds.items() if (r.from_step, r.from_digest) == (step, manifest.digest))
        attempt = max(manifest.attempt, *chosen, 0)
        if _newer_began_below(rewinds, attempt, step) or (attempt < best and step > _start_of(records, best)):
            off.append(step)
        elif attempt > best:
            off += [s for s in (at, *passed) if s]
            best, at, passed = attempt, step, []
        else:
            passed.append(step)
    return sorted(off, reverse=True)


def _newer_began_below(records: Mapping[int, Record], attempt: int, step: int) -> bool:
    """Whether an attempt newer than `attempt` has started from a step before `step`."""
    return any(number > attempt and record.from_step < step for number, record in records.items())


def _start_of(records: Mapping[int, Record], attempt: int) -> int:
    return records[attempt].from_step if attempt in records else 0


def set_overtaken_aside(store: Store, records: Mapping[int, Record], log: Callable[[str], None]) -> None:
    """Set aside the steps that are not on the run's line. Called by one process, at a start."""
    for step in overtaken(store, records):
        with store.named_errors():
            name = store.set_aside(step, OVERTAKEN)
        log(
            f"the snapshot of step {step} in {store.url} was committed by an attempt that a newer one had overtaken: "
            f"set aside (its manifest is now {name})"
        )


@dataclass(frozen=True)
class Newest:
    """The newest durable snapshot on the run's line: what a node compares its hot snapshots with. step 0: none.

    attempt: the number of the attempt that wrote it. result: the config and numerics that its bits follow from.
    unreadable: damaged steps above it. rewound: the attempt number of the last rewind; 0: none.
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
            if manifest := manifest_or_none(store, step):
                return cls(step, manifest.digest, manifest.attempt, _result(manifest), tuple(unreadable), rewound)
            if any(f.name == MANIFEST or f.was_damaged for f in store.files(step)):  # it was committed once
                unreadable.append(step)
        return cls(unreadable=tuple(unreadable), rewound=rewound)


def _result(manifest: Manifest) -> Any:
    values, affecting = settings(manifest.config)
    result = [{key: values.get(key) for key in sorted(affecting)}, manifest.fingerprint]
    return json.loads(json.dumps(result))  # tuples become lists, as in what another process has sent


@dataclass(frozen=True)
class HotBase:
    """A note beside the hot snapshots: the newest durable one that they continue (step 0: none).

    attempt: the number of the attempt that wrote the note.
    """

    attempt: int
    step: int
    digest: str | None

    def write(self, hot: Store) -> None:
        with hot.named_errors():
            write_whole(Path(hot.root) / NOTE, [json.dumps(asdict(self)).encode()])

    @classmethod
    def read(cls, hot: Store) -> "HotBase | None":
        try:
            return cls(**json.loads((Path(hot.root) / NOTE).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None


def stale_steps(hot: Store, newest: Newest) -> list[int]:
    """The hot steps that do not continue the newest durable snapshot."""
    base = HotBase.read(hot)
    return [step for step in hot.steps() if not _continues(hot, step, base, newest)]


def _continues(hot: Store, step: int, base: HotBase | None, newest: Newest) -> bool:
    if base is None or base.attempt < newest.rewound:
        return False
    if newest.step < base.step:  # the base is gone: deleted by somebody who went back, or only damaged?
        return base.step in newest.unreadable
    if newest.step == base.step:
        return newest.digest == base.digest
    # A newer snapshot is durable. It is of the same line if the same attempt wrote it, or if it has the same bits.
    if newest.attempt == base.attempt:
        return True
    manifest = manifest_or_none(hot, step)
    return manifest is None or newest.result == _result(manifest)
