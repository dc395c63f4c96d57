"""Which snapshots to delete, and which leftovers of killed writers: parts, temporary files, unfinished uploads.

`steps_to_delete` is the policy, a pure function. `plan` applies it to a store's content, and `Plan.apply` deletes.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mingpt.errors import Damaged, OtherFormat, Unreadable
from mingpt.snapshot.format import MANIFEST
from mingpt.snapshot.lineage import rewound
from mingpt.snapshot.reader import manifest_or_none, read_manifest
from mingpt.snapshot.store import PROBE, File, Store

DAY = 86400


@dataclass(frozen=True)
class Retention:
    """Keep the newest `keep`, each multiple of `keep_every` (0: none), and the one with the best validation loss.

    stable_until: a step whose snapshot stays, since the run can be extended from it; 0: none.
    orphan_age: seconds after which a file that belongs to no snapshot is a dead writer's. 0: never.
    """

    keep: int
    keep_every: int = 0
    keep_best: bool = True
    orphan_age: float = DAY
    stable_until: int = 0


def steps_to_delete(retention: Retention, snapshots: Mapping[int, float | None]) -> list[int]:
    """The steps to delete, oldest first. snapshots: validation loss by step, None where it was not measured."""
    steps = sorted(snapshots)
    stay = set(steps[-max(1, retention.keep) :])
    if retention.keep_every > 0:
        stay.update(step for step in steps if step % retention.keep_every == 0)
    stay.add(retention.stable_until)
    if retention.keep_best:
        measured = [(loss, step) for step in steps if (loss := snapshots[step]) is not None and math.isfinite(loss)]
        if measured:
            stay.add(min(measured)[1])  # of equal losses the oldest step
    return [step for step in steps if step not in stay]


@dataclass
class Plan:
    """What to delete: snapshots by step, and files and uploads that belong to no snapshot.

    rewound: manifests that rewinds have set aside, which go with their parts.
    """

    snapshots: list[int]
    leftovers: list[File]
    rewound: list[File]

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
    others = [f.name for f in files if f.name == MANIFEST or (f.is_set_aside and f.name != aside.name)]
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
    if not any(file.was_rewound for file in store.files(step)):
        return store.delete(step)
    bad = list[str]()
    stay = {name for aside, manifest in rewound(store, step, bad.append) for name in (aside, *manifest.parts)}
    if bad:
        return None  # nobody knows which parts are whose
    of_ours = [file for file in store.files(step) if file.name == MANIFEST or file.is_ours]
    store.remove(sorted((f for f in of_ours if f.name not in stay), key=lambda file: file.name != MANIFEST))


def plan(
    store: Store,
    retention: Retention,
    good: int,
    seen: dict[int, tuple[float | None, Any]],
    undoable: bool = True,
) -> Plan:
    """What to delete from a store whose snapshot of step `good` has been verified, or has just been written.

    No snapshot is deleted if one is newer than `good`: that one has not been verified, and its own writer deletes.
    A snapshot whose manifest is damaged or of another format stays, and does not count. A validation loss
    counts if it was measured on what the newest one was. seen: the validation losses of manifests that were read
    before, and what they were measured on; this call adds to it. undoable: whether what rewinds have set aside stays.
    """
    steps = store.steps()
    for step in steps:
        if step not in seen and (manifest := manifest_or_none(store, step)):
            seen[step] = manifest.metrics.val_loss, manifest.validated_on
    read = [step for step in steps if step in seen]
    known = {step: seen[step][0] if seen[step][1] == seen[read[0]][1] else None for step in read}
    old = steps_to_delete(retention, known) if steps and steps[0] == good else []
    newest = sorted(known)[-retention.keep :]
    oldest_new = newest[0] if len(newest) == retention.keep else 0
    remains = leftovers(store, retention.orphan_age, oldest_new) if retention.orphan_age > 0 else []
    rewound = [] if undoable else [f for step in store.folders() for f in store.files(step) if f.was_rewound]
    return Plan(old, remains, rewound)


def leftovers(store: Store, age: float, before_step: int, now: Callable[[], float] = time.time) -> list[File]:
    """Files of ours that belong to no snapshot, in folders where nothing is younger than `age` seconds; and uploads.

    In a folder without a manifest another attempt may be writing right now. A folder with a manifest that was set aside
    is evidence, so its files are listed only if its step is before `before_step`, and never if a rewind did that, which
    can be undone. If the store does not report times, nothing is listed.
    """

    def old(file: File) -> bool:
        return file.modified is not None and file.modified < now() - age

    beside = [f for f in store.files(None) if f.name.startswith(PROBE)]
    found = [f for f in (*beside, *store.unfinished_uploads()) if old(f)]
    committed = set(store.steps())
    for step in store.folders():
        if step in committed and not store.local:
            continue  # only local disks have temporary files
        files = store.files(step)
        evidence = any(f.was_rewound or (f.is_set_aside and step >= before_step) for f in files)
        if step in committed or evidence:
            found += [f for f in files if f.is_temporary and old(f)]
        elif all(old(f) for f in files):
            found += [f for f in files if f.is_ours]
    return found
