"""Which durable snapshots belong to the run's line, and which hot snapshots continue it.

The newest snapshot is not simply that of the highest step. An overtaken attempt may commit late (a preempted node that
was still uploading). A person may have gone back to an older step. A node's memory may hold steps from before that. A
restart must not bring any of these back.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from mingpt.cli.console import Say
from mingpt.config.affecting import settings
from mingpt.errors import Damaged, OtherFormat, TransientError, Unreadable, UserError
from mingpt.snapshot.attempts import REWIND, Count, Record, without_undone
from mingpt.snapshot.format import MANIFEST, Manifest
from mingpt.snapshot.reader import manifest_or_none, read_manifest
from mingpt.snapshot.store import OVERTAKEN, Store

NOTE, LONGEST_NOTE = "follows.json", 1024  # its bytes


def is_on(line: Mapping[int, tuple[int, int]], manifest: Manifest) -> bool:
    """Whether a snapshot is on a line of attempts.

    If attempt 3 has gone on from step 8 of attempt 2, the line is {3: (8, NO_END), 2: (4, 8), …}: step 10 of attempt 2
    is not on it. An attempt's own may be of the step that it continues (8 of attempt 3): a fork's first one, and one
    that was only in a node's memory.
    """
    first, end = line.get(manifest.attempt, (manifest.step + 1, 0))
    return first <= manifest.step <= end


def overtaken(store: Store, records: Mapping[int, Record]) -> list[int]:
    """The committed steps, newest first, that are not on the run's line.

    A step is off the line if the attempt that wrote it is older than a rewind to an earlier step, or older than an
    attempt that continued from an earlier step. In the second case it stays while that attempt has committed nothing.
    """
    records = without_undone(records)
    rewinds = {number: record for number, record in records.items() if record.by == REWIND}
    off = list[int]()
    rest = list[tuple[int, int]]()  # attempt and step
    head = 0, 0  # the newest attempt that has committed something, and its newest step
    start = 0  # the step from which that attempt has gone on
    for step in store.steps():
        # No manifest below that step can change the answer. Usually this is so at the second one: the newest snapshot
        # is the newest attempt's. To read all of them would cost a start one request each.
        if rest and step <= start and not _newer_began_below(records, *head):
            break
        # One that is bad stays where it is: `restore` sets it aside, and says why.
        if (manifest := manifest_or_none(store, step)) is None:
            continue
        attempt = manifest.attempt
        for number, rewind in rewinds.items():
            # A snapshot that somebody has rewound to counts as the rewind's, or else the rewind would cut it off.
            if (rewind.from_step, rewind.from_digest) == (step, manifest.digest):
                attempt = max(attempt, number)
        if _newer_began_below(rewinds, attempt, step):
            off.append(step)
        else:
            rest.append((attempt, step))
            if (attempt, step) > head:
                head, start = (attempt, step), _start_of(attempt, records, manifest)
    off += [step for attempt, step in rest if attempt < head[0] and step > start]
    return sorted(off, reverse=True)


def _newer_began_below(records: Mapping[int, Record], attempt: int, step: int) -> bool:
    """Whether an attempt newer than `attempt` has started from a step before `step`."""
    return any(number > attempt and record.from_step < step for number, record in records.items())


def _start_of(attempt: int, records: Mapping[int, Record], manifest: Manifest) -> int:
    """The step from which an attempt has gone on. manifest: one that it has committed."""
    if attempt in records:
        return records[attempt].from_step
    # No claim: snapshot.dir is elsewhere, and run.dir is lost or a new folder. The snapshots' history tells it, too.
    told = [entry.get("from_step") for entry in manifest.history if entry.get("attempt") == attempt]
    return next((start for start in told if type(start) is int), 0)


def set_overtaken_aside(store: Store, records: Mapping[int, Record], log: Say) -> None:
    """Set aside the steps that are not on the run's line. Called by one process, at a start."""
    for step in overtaken(store, records):
        with store.named_errors():
            name = store.set_aside(step, OVERTAKEN)
        log(
            f"the snapshot of step {step} in {store.url} was committed by an attempt that a newer one had overtaken: "
            f"set aside (its manifest is now {name})"
        )


@dataclass(frozen=True)
class NewestDurable:
    """The newest durable snapshot on the run's line: what a node compares its hot snapshots with."""

    step: int = 0  # 0: there is none
    digest: str | None = None
    attempt: int = 0  # the number of the one that wrote it
    result: Any = None  # the config and numerics that its bits follow from
    damaged: tuple[int, ...] = ()  # steps above it
    rewound: int = 0  # the attempt number of the last rewind; 0: there was none

    @classmethod
    def of(cls, store: Store, records: Mapping[int, Record]) -> "NewestDurable":
        rewound = max((n for n, record in records.items() if record.by == REWIND), default=0)
        damaged: list[int] = []
        # Folders, and not committed steps: a damaged one may have been set aside, and has no manifest any more.
        for step in store.folders():
            if manifest := manifest_or_none(store, step):
                return cls(step, manifest.digest, manifest.attempt, _result(manifest), tuple(damaged), rewound)
            if any(f.name == MANIFEST or f.was_damaged for f in store.files(step)):  # it was committed once
                damaged.append(step)
        return cls(damaged=tuple(damaged), rewound=rewound)


def _result(manifest: Manifest) -> Any:
    values, affecting = settings(manifest.config)
    result = [{key: values.get(key) for key in sorted(affecting)}, manifest.fingerprint]
    return json.loads(json.dumps(result))  # tuples become lists, as in what another process has sent


@dataclass(frozen=True)
class HotBase:
    """A note beside the hot snapshots: the newest durable one that they continue."""

    attempt: Count  # the number of the one that wrote the note
    step: Count  # 0: they continue nothing durable
    digest: str | None  # None: not known, since it is damaged

    def write(self, memory: Store) -> None:
        memory.write(NOTE, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, memory: Store) -> "HotBase | None":
        """None without one, and for one that can't be read: nobody knows what the hot snapshots continue."""
        try:
            return HOT_BASE.validate_json(memory.read(NOTE, LONGEST_NOTE) or b"", strict=True)
        except (UserError, TransientError, ValueError):
            return None


HOT_BASE = TypeAdapter(HotBase)


def stale_steps(memory: Store, newest: NewestDurable) -> list[int]:
    """The hot steps that do not continue the newest durable snapshot."""
    base = HotBase.read(memory)
    return [step for step in memory.steps() if not _hot_continues(memory, step, base, newest)]


def _hot_continues(memory: Store, step: int, base: HotBase | None, newest: NewestDurable) -> bool:
    # A note from before the last rewind, which clears only its own node's memory: what lies beside the note is what
    # somebody wanted to get rid of.
    if base is None or base.attempt < newest.rewound:
        return False
    if newest.step < base.step:
        # The base is gone. If it is damaged, memory has what was computed from it while it was good. If somebody has
        # deleted it to go back, memory must not bring that back.
        return base.step in newest.damaged
    if newest.step == base.step:
        return newest.digest == base.digest
    # A newer snapshot is durable, which this node did not hear of. It is of the same line if the same attempt wrote it,
    # or if it has the same bits.
    if newest.attempt == base.attempt:
        return True
    manifest = manifest_or_none(memory, step)
    # Without a manifest nobody can tell: `restore` finds out, and sets it aside.
    return manifest is None or newest.result == _result(manifest)


def rewound(
    store: Store, step: int, bad: Callable[[str], object], overtaken: bool = False
) -> Iterator[tuple[str, Manifest]]:
    """The snapshots of a step that a rewind has set aside: the manifest's name now, and what it says.

    bad: told of each that can't be read. overtaken: those of overtaken attempts, too.
    """
    for file in store.files(step):
        aside = file.was_rewound or (overtaken and file.is_set_aside and not file.was_damaged)
        if aside and file.size is not None:  # else a link
            try:
                yield file.name, read_manifest(store, step, file.name)
            except (Damaged, OtherFormat, Unreadable) as problem:
                bad(f"step {step}: DAMAGED, set aside as {file.name}: {problem}")
