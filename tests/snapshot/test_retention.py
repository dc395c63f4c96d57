"""Which snapshots stay, and what dead writers left: mingpt.snapshot.retention."""

import json
import math
import os
import time
from pathlib import Path

import pytest

from mingpt.errors import Superseded
from mingpt.snapshot.reader import read, verify
from mingpt.snapshot.retention import Retention, leftovers, plan, steps_to_delete
from mingpt.snapshot.store import Store
from tests.kits.snapshot_kit import PROVENANCE, read_newest, save, signed

DAY = 86400


@pytest.mark.parametrize(
    ("retention", "snapshots", "go"),
    [
        (Retention(2), {30: None, 10: None, 20: None, 5: None}, [5, 10]),
        (Retention(1, keep_every=10), {10: None, 15: None, 20: None, 25: None, 26: None}, [15, 25]),
        (Retention(1), {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 4.0}, [1, 3, 4]),
        (Retention(1), {1: math.nan, 2: -math.inf, 3: 2.0, 4: None}, [1, 2]),
        (Retention(2), {1: 5.0, 2: 1.0, 3: None}, [1]),  # the best is among the newest
        (Retention(0), {1: None, 2: None}, [1]),  # never nothing
    ],
)
def test_what_goes(retention: Retention, snapshots: dict[int, float | None], go: list[int]) -> None:
    assert steps_to_delete(retention, snapshots) == go


def test_the_best_is_one_of_those_that_were_measured_alike(store: Store) -> None:
    """A lower loss on another part of the split, or on other data, is no better one."""
    for step, (val_loss, part, data) in enumerate(
        ((1.0, [2, 9], "x"), (0.5, [9, 9], "other"), (3.0, [9, 9], "x"), (2.0, [9, 9], "x"), (4.0, [9, 9], "x")), 1
    ):
        entry = {"attempt": step, "validation": part}
        told = PROVENANCE | {"history": [entry], "fingerprint": {"data": data}}
        save(store, step, keep=Retention(1), val_loss=val_loss, provenance=told)
        assert store.steps() == {1: [1], 2: [2], 3: [3], 4: [4], 5: [5, 4]}[step]


def test_who_is_overtaken_or_finds_another_state_deletes_nothing(store: Store) -> None:
    """An attempt that wakes up late and commits an old step knows nothing of the newer ones."""
    for step in (10, 20, 30):
        save(store, step)
    save(store, 15, keep=1)
    with pytest.raises(Superseded):
        save(store, 30, read(store, 10).state, keep=1)
    assert store.steps() == [30, 20, 15, 10]


def test_a_damaged_manifest_or_one_of_another_format_counts_for_nothing_and_stays(store: Store) -> None:
    for step in (1, 2, 3, 4):
        save(store, step)
    store.fs.pipe_file(f"{store.folder(2)}/manifest.json", signed(json.loads(store.read_manifest(2)) | {"format": 4}))
    store.fs.pipe_file(f"{store.folder(3)}/manifest.json", b"{}")
    save(store, 5, keep=2)
    assert store.steps() == [5, 4, 3, 2]


def test_a_clean_up_that_fails_costs_no_snapshot(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)

    def refused(path: str) -> None:
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(store.fs, "rm_file", refused)
        digest = save(store, 2, keep=1)
    assert read(store, 2).manifest.digest == digest
    save(store, 3, keep=1)
    assert store.steps() == [3]


# How old leftovers are: on a disk. tests/stores holds that each kind of store tells the time.


def make_old(folder: str, seconds: float = DAY + 60) -> None:
    """All that is in it, and itself."""
    then = time.time() - seconds
    for path in (*Path(folder).iterdir(), Path(folder)):
        os.utime(path, (then, then))


def orphan(store: Store, step: int, seconds: float = DAY + 60) -> None:
    """The parts of a writer that was killed before the commit."""
    save(store, step, keep=99)
    store.fs.rm_file(f"{store.folder(step)}/manifest.json")
    make_old(store.folder(step), seconds)


def test_a_dead_writers_parts_go_after_a_day_and_never_sooner(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan(store, 1)
    assert leftovers(store, DAY, 0)
    with monkeypatch.context() as patch:  # a store that can't tell times keeps all
        patch.setattr("mingpt.snapshot.store.modified", lambda entry: None)
        assert leftovers(store, DAY, 0) == []
    orphan(store, 2, DAY - 600)
    save(store, 3)
    assert store.folders() == [3, 2]
    make_old(store.folder(2))
    save(store, 4, keep=Retention(9, orphan_age=0))  # 0: never
    assert store.folders() == [4, 3, 2]
    save(store, 5)
    assert store.folders() == [5, 4, 3]


def test_one_young_file_keeps_its_whole_folder(store: Store) -> None:
    """Another attempt is writing the step that a killed one has begun."""
    orphan(store, 1)
    names = {f.name for f in store.files(1)}
    store.fs.pipe_file(f"{store.folder(1)}/{min(names)}", b"again")
    save(store, 2)
    assert {f.name for f in store.files(1)} == names


def test_a_prune_deletes_nothing_whose_manifest_came_meanwhile(store: Store) -> None:
    digest = save(store, 3)
    manifest = store.read_manifest(3)
    orphan(store, 3)
    found = plan(store, Retention(9), 9, {})
    assert len(found.leftovers) == 2
    store.fs.pipe_file(f"{store.folder(3)}/manifest.json", manifest)
    found.apply(store)
    assert verify(store, 3).digest == digest


def test_what_is_not_ours_stays_and_probes_and_temporary_files_go(store: Store) -> None:
    orphan(store, 1)
    for name in ("step-000000001/notes.txt", "step-000000001/.manifest.json.1.tmp", "notes.txt", ".probe-ab"):
        store.fs.pipe_file(f"{store.root}/{name}", b"mine")
    make_old(store.folder(1))
    make_old(store.root)
    store.fs.pipe_file(f"{store.root}/.probe-cd", b"young")
    save(store, 2)
    assert {f.name for f in store.files(1)} == {"notes.txt"}
    assert {f.name for f in store.files(None)} == {"notes.txt", ".probe-cd"}


def test_what_was_set_aside_goes_when_its_step_is_beyond_retention(store: Store) -> None:
    for step in (1, 2, 3):
        save(store, step)
    store.fs.pipe_file(f"{store.folder(3)}/manifest.json", b"{}")
    assert read_newest(store, print)
    make_old(store.folder(3))
    save(store, 4, keep=2)
    assert (store.steps(), store.folders()) == ([4, 2], [4, 3, 2])  # newer than the oldest of the newest
    save(store, 5, keep=2)
    assert store.folders() == [5, 4]
