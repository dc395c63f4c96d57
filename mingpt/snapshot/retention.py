"""Which snapshots stay, and what else may go: parts and temporary files that killed writers left.

`steps_to_delete` is the policy, a pure function; `plan` looks at a store, and `Plan.apply` deletes.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mingpt.errors import Damaged, OtherFormat, Unreadable
from mingpt.snapshot.files import File
from mingpt.snapshot.reader import look
from mingpt.snapshot.store import Store
from mingpt.snapshot.uploads import HalfUpload, abort, half_uploads
from mingpt.storage import place

DAY = 86400


@dataclass(frozen=True)
class Retention:
    """The newest `keep` stay, each multiple of `keep_every` (0: none), and the one with the best validation loss.

    orphan_age: seconds after which what belongs to no snapshot is taken for a dead writer's. 0: never.
    """

    keep: int
    keep_every: int = 0
    keep_best: bool = True
    orphan_age: float = DAY


def steps_to_delete(retention: Retention, snapshots: Mapping[int, float | None]) -> list[int]:
    """The steps that need not stay, oldest first, of snapshots given as {step: validation loss, if measured there}."""
    steps = sorted(snapshots)
    stay = set(steps[-max(1, retention.keep) :])
    if retention.keep_every > 0:
        stay.update(step for step in steps if step % retention.keep_every == 0)
    if retention.keep_best:
        measured = [(loss, step) for step in steps if (loss := snapshots[step]) is not None and math.isfinite(loss)]
        if measured:
            stay.add(min(measured)[1])  # of equals the oldest: the first to reach it
    return [step for step in steps if step not in stay]


@dataclass
class Plan:
    """What would be deleted: snapshots by step, and files and half uploads that belong to none."""

    snapshots: list[int] = field(default_factory=list)
    leftovers: list[File] = field(default_factory=list)
    uploads: list[HalfUpload] = field(default_factory=list)

    def apply(self, store: Store) -> None:
        with place(store.key, store.url):
            for step in self.snapshots:
                store.delete(step)
            store.remove(self.leftovers)
            for upload in self.uploads:
                abort(store, upload)


def plan(store: Store, retention: Retention, good: int, seen: dict[int, float | None]) -> Plan:
    """What may go from a store whose snapshot of step `good` is known to be good.

    No snapshot goes if a newer one than `good` is there: nobody has looked at that one, and its writer deletes.
    A snapshot whose manifest is damaged or of another format counts for nothing and stays. seen: the validation losses
    of manifests that were read before, which is added to.
    """
    steps = store.steps()
    known: dict[int, float | None] = {}
    for step in steps:
        try:
            known[step] = seen[step] if step in seen else look(store, step).metrics.val_loss
        except (Damaged, OtherFormat, Unreadable):
            continue
    seen.update(known)
    old = steps_to_delete(retention, known) if steps and steps[0] == good else []
    newest = sorted(known)[-retention.keep :]
    oldest_new = newest[0] if len(newest) == retention.keep else 0
    if retention.orphan_age <= 0:
        return Plan(old)
    uploads = [u for u in half_uploads(store) if u.started < time.time() - retention.orphan_age]
    return Plan(old, leftovers(store, retention.orphan_age, oldest_new), uploads)


def leftovers(store: Store, age: float, before_step: int, now: Callable[[], float] = time.time) -> list[File]:
    """Files of ours that belong to no snapshot, when nothing in their folder is younger than `age` seconds.

    In a folder without a manifest another attempt may be writing at this moment. A folder with a manifest that was set
    aside is evidence, and goes only if its step is before `before_step`. A store that can't tell times keeps all.
    """

    def old(file: File) -> bool:
        return file.modified is not None and file.modified < now() - age

    found = [f for f in store.files(None) if f.is_probe and old(f)]
    committed = set(store.steps())
    for step in store.folders():
        if step in committed and not store.local:
            continue  # temporary files are a local disk's
        files = store.files(step)
        evidence = any(f.is_set_aside for f in files) and step >= before_step
        if step in committed or evidence:
            found += [f for f in files if f.is_temporary and old(f)]
        elif all(old(f) for f in files):
            found += [f for f in files if f.is_ours]
    return found
