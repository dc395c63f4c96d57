"""Which snapshots to delete, and which leftovers of killed writers: parts, temporary files, unfinished uploads.

`steps_to_delete` is the policy, a pure function. `plan` applies it to a store's content, and `Plan.apply` deletes.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mingpt.errors import Damaged, OtherFormat, Unreadable
from mingpt.snapshot.format import MANIFEST
from mingpt.snapshot.reader import Seen, best_of, read_manifest, val_losses
from mingpt.snapshot.store import PROBE, File, Store

DAY = 86400


@dataclass(frozen=True)
class Retention:
    """Which snapshots stay."""

    keep: int  # the newest ones
    keep_every: int = 0  # each multiple of it; 0: none
    keep_best: bool = True  # the one with the best validation loss
    orphan_age: float = DAY  # seconds after which a file that belongs to no snapshot is a dead writer's; 0: never
    stable_until: int = 0  # a step whose snapshot stays, since the run can be extended from it; 0: none


def steps_to_delete(retention: Retention, snapshots: Mapping[int, float | None]) -> list[int]:
    """The steps to delete, oldest first. snapshots: validation loss by step, None where it was not measured."""
    steps = sorted(snapshots)
    stay = set(steps[-max(1, retention.keep) :])
    stay.add(retention.stable_until)
    for step in steps:
        if retention.keep_every > 0 and step % retention.keep_every == 0:
            stay.add(step)
    best = best_of(snapshots)
    if retention.keep_best and best is not None:
        stay.add(best)
    return [step for step in steps if step not in stay]


@dataclass
class Plan:
    """What to delete."""

    snapshots: list[int]  # steps
    leftovers: list[File]  # files and uploads that belong to no snapshot
    rewound: list[File]  # manifests that rewinds have set aside, which go with their parts

    def apply(self, store: Store) -> None:
        def belongs_to_none(file: File) -> bool:  # or else its writer was slow, and not dead
            return file.step is None or file.is_temporary or bool(file.upload) or not store.is_committed(file.step)

        with store.named_errors():
            for manifest in self.rewound:
                _delete_rewound(store, manifest)
            for step in self.snapshots:
                _delete(store, step)
            store.remove(filter(belongs_to_none, self.leftovers))  # asked just before each is deleted


def _delete_rewound(store: Store, aside: File) -> None:
    """Delete a manifest that a rewind has set aside, and those of its parts that no other snapshot of the step has."""
    assert aside.step is not None
    files = store.files(aside.step)
    if all(file.name != aside.name for file in files):
        return  # an undo has brought it back meanwhile
    parts = _parts_of(store, aside.step, [aside.name])
    store.remove([aside])  # first: now no undo can bring it back
    others = list[str]()
    for file in files:
        if file.name == MANIFEST or (file.is_set_aside and file.name != aside.name):
            others.append(file.name)
    # Equal bits have equal names: an attempt that computed the step again may have the same parts.
    stay = _parts_of(store, aside.step, others)
    if parts is None or stay is None:
        return  # nobody knows which parts are whose

    def is_being_written(file: File) -> bool:  # by an attempt that computes the step again, with the same bits
        return bool(file.modified and aside.modified and file.modified > aside.modified)

    store.remove(f for f in files if f.name in parts - stay and not is_being_written(f))


def _parts_of(store: Store, step: int, manifests: Iterable[str]) -> set[str] | None:
    """The parts that these manifests of a step name. None if one can't be read."""
    try:
        return {part for name in manifests for part in read_manifest(store, step, name).parts}
    except (Damaged, OtherFormat, Unreadable):
        return None


def _delete(store: Store, step: int) -> None:
    """Delete a snapshot, but not what a rewind has set aside of the same step."""
    files = store.files(step)
    asides = [file.name for file in files if file.was_rewound]
    if not asides:
        return store.delete(step)
    stay = _parts_of(store, step, asides)
    if stay is None:
        return None  # nobody knows which parts are whose
    go = list[File]()
    for file in files:
        if (file.name == MANIFEST or file.is_ours) and file.name not in {*stay, *asides}:
            go.append(file)
    # The manifest first: a reader sees the whole snapshot or none.
    store.remove(sorted(go, key=lambda file: file.name != MANIFEST))


def plan(store: Store, retention: Retention, good: int, seen: Seen, undoable: bool = True) -> Plan:
    """What to delete from a store whose snapshot of step `good` has been verified, or has just been written.

    No snapshot is deleted if one is newer than `good`: that one has not been verified, and its own writer deletes.
    A snapshot whose manifest is damaged or of another format stays, and does not count. A validation loss
    counts if it was measured on what the newest one was. seen: as in `val_losses`. undoable: whether what rewinds have
    set aside stays.
    """
    steps = store.steps()
    losses = val_losses(store, steps, seen)
    # A newer one than `good` was never verified. If it is bad, what this would delete may be the newest good one.
    old = steps_to_delete(retention, losses) if steps and steps[0] == good else []
    newest = sorted(losses)[-retention.keep :]
    oldest_new = newest[0] if len(newest) == retention.keep else 0
    remains = leftovers(store, retention.orphan_age, oldest_new) if retention.orphan_age > 0 else []
    set_aside = list[File]()
    for step in [] if undoable else store.folders():
        set_aside += [file for file in store.files(step) if file.was_rewound]
    return Plan(old, remains, set_aside)


def leftovers(store: Store, age: float, before_step: int, now: Callable[[], float] = time.time) -> list[File]:
    """Files of ours that belong to no snapshot, in folders where nothing is younger than `age` seconds; and uploads.

    In a folder without a manifest another attempt may be writing right now. A folder with a manifest that was set aside
    is evidence, so its files are listed only if its step is before `before_step`, and never if a rewind did that, which
    can be undone. If the store does not report times, nothing is listed.
    """

    def old(file: File) -> bool:
        return file.modified is not None and file.modified < now() - age

    found = [file for file in store.files(None) if file.name.startswith(PROBE) and old(file)]
    found += filter(old, store.unfinished_uploads())
    committed = set(store.steps())
    for step in store.folders():
        if step in committed and not store.local:
            continue  # only local disks have temporary files
        files = store.files(step)
        evidence = any(f.was_rewound or (f.is_set_aside and step >= before_step) for f in files)
        if step in committed or evidence:
            found += [f for f in files if f.is_temporary and old(f)]
        # All of the folder or nothing: a second attempt that writes there counts on parts that are there already.
        elif all(old(f) for f in files):
            found += [f for f in files if f.is_ours]
    return found
