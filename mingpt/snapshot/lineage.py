"""Which durable snapshots belong to the run's line, which hot snapshots continue it, and how a run goes back.

The newest snapshot is not simply that of the highest step. An overtaken attempt may commit late (a preempted node that
was still uploading). A person may have gone back to an older step. A node's memory may hold steps from before that. A
restart must not bring any of these back.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter

from mingpt.config.affecting import settings
from mingpt.errors import Damaged, OtherFormat, TransientError, Unreadable, UserError
from mingpt.snapshot import hot
from mingpt.snapshot.attempts import REWIND, Attempt, Count, Record, line_of, records, without_undone
from mingpt.snapshot.format import MANIFEST, Manifest
from mingpt.snapshot.reader import damage_as, manifest_or_none, read_manifest
from mingpt.snapshot.store import OVERTAKEN, REWOUND, Store

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
    for step in store.steps():
        # No manifest below that step can change the answer. Usually this is so at the second one: the newest snapshot
        # is the newest attempt's. To read all of them would cost a start one request each.
        if rest and step <= _start_of(records, head[0]) and not _newer_began_below(records, *head):
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
            head = max(head, (attempt, step))
    start = _start_of(records, head[0])
    off += [step for attempt, step in rest if attempt < head[0] and step > start]
    return sorted(off, reverse=True)


def _newer_began_below(records: Mapping[int, Record], attempt: int, step: int) -> bool:
    """Whether an attempt newer than `attempt` has started from a step before `step`."""
    return any(number > attempt and record.from_step < step for number, record in records.items())


def _start_of(records: Mapping[int, Record], attempt: int) -> int:
    # No claim: with snapshot.dir set, run.dir may be a new folder.
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
class NewestDurable:
    """The newest durable snapshot on the run's line: what a node compares its hot snapshots with."""

    step: int = 0  # 0: there is none
    digest: str | None = None
    attempt: int = 0  # the number of the one that wrote it
    result: Any = None  # the config and numerics that its bits follow from
    unreadable: tuple[int, ...] = ()  # damaged steps above it
    rewound: int = 0  # the attempt number of the last rewind; 0: there was none

    @classmethod
    def of(cls, store: Store, records: Mapping[int, Record] = MappingProxyType({})) -> "NewestDurable":
        rewound = max((n for n, record in records.items() if record.by == REWIND), default=0)
        unreadable: list[int] = []
        # Folders, and not committed steps: a damaged one may have been set aside, and has no manifest any more.
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
        return base.step in newest.unreadable
    if newest.step == base.step:
        return newest.digest == base.digest
    # A newer snapshot is durable, which this node did not hear of. It is of the same line if the same attempt wrote it,
    # or if it has the same bits.
    if newest.attempt == base.attempt:
        return True
    manifest = manifest_or_none(memory, step)
    # Without a manifest nobody can tell: `restore` finds out, and sets it aside.
    return manifest is None or newest.result == _result(manifest)


# Going back: the run continues from an older step, and nothing computed after it comes back by itself


def rewind(
    run_dir: str,
    store: Store,
    step: int,
    hot_dir: str,
    log: Callable[[str], None],
    dropped: tuple[int, int] | None = None,
) -> None:
    """Make the next attempt start from `step`: set all newer snapshots aside, in the store and in this node's memory.

    The rewind is an attempt of its own. So an attempt that is still training commits nothing more, and the next start
    removes older hot snapshots from the memory of all nodes. dropped: batches (first, end) that no step shows any more.
    Raises UserError, before it changes anything, if `step` can't be read.
    """
    steps = store.steps()
    if step not in steps:
        shown = ", ".join(map(str, steps)) or "none"
        raise UserError(
            f"{store.url}: there is no snapshot of step {step}: choose one of those that there are ({shown})"
        )
    with damage_as(UserError, store, step, ": choose another step"):
        manifest = read_manifest(store, step)
    # The claim comes first: if this is killed after it, the next start sets the rest aside, as overtaken.
    Attempt.claim(
        run_dir,
        step,
        manifest.digest,
        manifest.attempt,
        by=REWIND,
        above=_newest_attempt(store, manifest),
        dropped=dropped,
    )
    _set_rewound_aside(run_dir, store, hot_dir, lambda tier, s: s > step, log)
    log(f"the next attempt starts from step {step}, digest {manifest.digest}")


def _newest_attempt(store: Store, manifest: Manifest) -> int:
    """The newest attempt that a snapshot names: with snapshot.dir set, run.dir may be new and have no claims."""
    newest = manifest.attempt
    for step in store.steps():
        if other := manifest_or_none(store, step):
            newest = max(newest, other.attempt)
    return newest


def _set_rewound_aside(
    run_dir: str, store: Store, hot_dir: str, which: Callable[[Store, int], bool], log: Callable[[str], None]
) -> None:
    memory = hot.find_hot(hot_dir, run_dir)
    for tier in (store, *([memory] if memory else [])):
        with tier.named_errors():
            # Newest first: if this is killed half way, what is left is a line without a hole.
            for step in tier.steps():
                if which(tier, step):
                    name = tier.set_aside(step, REWOUND)
                    log(f"step {step}: set aside (its manifest is now {tier.folder_url(step)}/{name})")


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


def undo(run_dir: str, store: Store, hot_dir: str, log: Callable[[str], None]) -> None:
    """Take the newest rewind back: what it has set aside is committed again, and what came after it is set aside.

    Raises UserError, before it changes anything, if there is none, or nothing that can be brought back.
    """
    claims = records(run_dir)
    back = dict[int, tuple[str, Manifest]]()
    claim = claims.get(max(claims, default=0))
    if claim and claim.undoes in claims:
        # The newest claim is an undoing. If something is left of it to bring back, it was killed: go on with it.
        back = _left_by(claims, claim.undoes, store, log)
    if not back:
        number = _to_undo(claims)
        if not number:
            raise UserError(f"{run_dir}: no rewind is there that could be undone")
        back = _left_by(claims, number, store, log)
        if not back:
            raise UserError(
                f"{run_dir}: the rewind to step {claims[number].from_step} can't be undone: nothing that it set aside "
                f"can be brought back"
            )
        newest = back[max(back)][1]
        claim = Attempt.claim(
            run_dir,
            newest.step,
            newest.digest,
            newest.attempt,
            by=REWIND,
            above=_newest_attempt(store, newest),
            undoes=number,
        ).record
    assert claim is not None
    assert claim.undoes is not None
    line, start = line_of(claims, claim.undoes - 1), claims[claim.undoes].from_step

    def came_after(tier: Store, step: int) -> bool:
        found = manifest_or_none(tier, step)
        return step > start and not (found and is_on(line, found))

    _set_rewound_aside(run_dir, store, hot_dir, came_after, log)
    with store.named_errors():
        # The newest first: an attempt that starts meanwhile begins from it, as if all were back.
        for step, (name, _) in sorted(back.items(), reverse=True):
            store.bring_back(step, name)
            log(f"step {step}: brought back")
    log(f"the next attempt starts from step {claim.from_step}, digest {claim.from_digest}")


def _to_undo(claims: Mapping[int, Record]) -> int:
    """The number of the newest rewind that was not undone; 0: there is none."""
    newest = 0
    for number, record in without_undone(claims).items():
        if record.by == REWIND and record.undoes is None and not _went_nowhere(claims, number):
            newest = max(newest, number)
    return newest


def _left_by(
    claims: Mapping[int, Record], number: int, store: Store, log: Callable[[str], None]
) -> dict[int, tuple[str, Manifest]]:
    """What a rewind has set aside of the line before it, and is aside now, by step, if its parts are still there."""
    line, left = line_of(claims, number - 1), dict[int, tuple[str, Manifest]]()
    for step in store.folders():
        if step <= claims[number].from_step:
            break  # they come newest first
        try:
            for name, manifest in rewound(store, step, log):
                if is_on(line, manifest):
                    for part, info in manifest.parts.items():
                        store.check_size(step, part, info.size)
                    left[step] = name, manifest
                    break
        except (Damaged, Unreadable) as problem:
            log(f"step {step}: can't be brought back: {problem}")
    return left


def _went_nowhere(claims: Mapping[int, Record], number: int) -> bool:
    """Whether the claim before this rewind is one to the same snapshot: it has set nothing more aside."""
    before, record = claims.get(number - 1), claims[number]
    at = record.from_step, record.from_digest
    return before is not None and before.by == REWIND and (before.from_step, before.from_digest) == at
