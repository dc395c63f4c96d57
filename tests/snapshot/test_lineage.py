"""What follows from what: late commits, two starts at once, going back, and what a node's memory may bring back."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from mingpt.commands import snapshots
from mingpt.errors import Superseded
from mingpt.snapshot import hot
from mingpt.snapshot.attempts import REWIND, Attempt, records
from mingpt.snapshot.format import Kind
from mingpt.snapshot.lineage import HotBase, Newest, overtaken, set_overtaken_aside, stale_steps
from mingpt.snapshot.restore import restore
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.rewinding import rewind
from mingpt.snapshot.store import Store
from mingpt.snapshot.writer import SnapshotWriter
from snapshot_kit import ALONE, PROVENANCE, save, state_of
from store_kit import Stores
from told import Told

Captured = pytest.CaptureFixture[str]


def of(attempt: int, lr: float = 0.1) -> dict[str, Any]:
    """The provenance of an attempt's snapshots. The section `world` does not enter the result."""
    settings = {"optimizer": {"lr": lr}, "world": {"size": attempt}}
    return PROVENANCE | {"config": settings, "history": [{"attempt": attempt}]}


def claim(run: Path, *starts: int) -> list[Attempt]:
    """Attempts 1, 2, … which went on from these steps."""
    return [Attempt.claim(str(run), start, None) for start in starts]


# --- claims ---


def test_of_two_attempts_that_start_at_once_each_has_a_number_of_its_own(tmp_path: Path) -> None:
    together, got = threading.Barrier(8), list[int]()

    def start() -> None:
        together.wait()
        got.append(Attempt.claim(str(tmp_path), 0, None).number)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(1, 9)) == sorted(records(str(tmp_path)))


def test_an_older_attempt_is_told_that_a_newer_one_has_started(tmp_path: Path, told: Told) -> None:
    first, second = claim(tmp_path, 0, 20)
    with pytest.raises(Superseded) as end:
        first.check()
    told(str(end.value), tmp_path)
    second.check()
    assert records(str(tmp_path))[2] == second.record


def test_where_both_could_take_one_number_the_last_one_to_write_has_it(tmp_path: Path) -> None:
    """As on a store that does not heed conditional puts."""
    [first] = claim(tmp_path, 0)
    shutil.rmtree(tmp_path / "attempts")
    [second] = claim(tmp_path, 0)
    assert first.number == second.number == 1
    second.check()
    with pytest.raises(Superseded, match="attempt 1 has started while this attempt, number 1"):
        first.check()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"id": 1}', b"\xff", b"[" * 100_000])
def test_a_claim_that_cannot_be_read_says_nothing_but_its_number(tmp_path: Path, content: bytes) -> None:
    [first] = claim(tmp_path, 0)
    (tmp_path / "attempts/00007.json").write_bytes(content)
    assert list(records(str(tmp_path))) == [1]
    with pytest.raises(Superseded, match="attempt 7 has started"):
        first.check()


# --- the durable line ---


@pytest.mark.parametrize(
    ("starts", "commits", "late"),
    [
        ([0, 20], {20: 1, 29: 2, 36: 2, 38: 1, 40: 1}, [40, 38]),  # attempt 1 woke up while 2 went on from step 20
        ([0, 20], {20: 1, 40: 1}, []),  # the newer one has committed nothing
        ([0, 20], {20: 1, 25: 2, 30: 1, 35: 2}, [30]),  # between the newer one's steps
        ([0, 20, 40], {10: 1, 20: 1, 40: 2, 50: 3}, []),
    ],
)
def test_the_newest_attempts_snapshots_are_the_line_and_not_the_highest_step(
    tmp_path: Path, starts: list[int], commits: dict[int, int], late: list[int]
) -> None:
    store = Store(str(tmp_path / "snapshots"))
    claim(tmp_path, *starts)
    for step, attempt in commits.items():
        save(store, step, provenance=of(attempt))
    said: list[str] = []
    set_overtaken_aside(store, records(str(tmp_path)), said.append)
    assert store.steps() == sorted(commits.keys() - set(late), reverse=True)
    assert [int(line.split(" in ")[0].split()[-1]) for line in said] == late
    assert [len(list(Path(store.folder(step)).glob("set-aside-overtaken-*"))) for step in late] == [1] * len(late)


def test_after_a_rewind_nothing_that_is_committed_late_counts(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "snapshots"))
    claim(tmp_path, 0)
    save(store, 20, provenance=of(1))
    Attempt.claim(str(tmp_path), 20, None, by=REWIND)
    save(store, 40, provenance=of(1))
    assert overtaken(store, records(str(tmp_path))) == [40]


def test_one_manifest_is_read_where_nothing_was_overtaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path / "snapshots"))
    claim(tmp_path, 0, 20, 40)
    for step, attempt in ((10, 1), (20, 1), (40, 2), (50, 3)):
        save(store, step, provenance=of(attempt))
    read, plain = list[int](), Store.read_manifest

    def note(self: Store, step: int) -> bytes:
        read.append(step)
        return plain(self, step)

    monkeypatch.setattr(Store, "read_manifest", note)
    assert overtaken(store, records(str(tmp_path))) == []
    assert read == [50]


class Slow(Store):
    """While this store commits, a newer attempt starts at step 20 and commits."""

    def __init__(self, run: Path, commits: int) -> None:
        super().__init__(str(run / "snapshots"))
        self.run, self.commits = run, commits

    def commit(self, step: int, manifest: bytes) -> bool:
        claim(self.run, 20)
        save(Store(self.root), self.commits, provenance=of(2))
        return super().commit(step, manifest)


@pytest.mark.parametrize(("step", "newer"), [(40, 36), (30, 30)])
def test_an_attempt_that_is_overtaken_during_its_commit_ends_and_takes_nothing_from_the_newer_one(
    tmp_path: Path, step: int, newer: int
) -> None:
    """Where both commit the same bits of the same step, the newer one may have ended with 0 already."""
    store = Slow(tmp_path, newer)
    save(Store(store.root), 20, provenance=of(1))
    [first] = claim(tmp_path, 0)
    writer = SnapshotWriter(store, ALONE, Retention(9), of(1), print, claim=first)
    with pytest.raises(Superseded, match="attempt 2 has started"):
        writer.save(step, state_of(step))
    assert writer.broken
    set_overtaken_aside(store, records(str(tmp_path)), print)
    assert store.steps() == [newer, 20]


def test_a_step_that_somebody_went_back_to_is_on_the_line_whoever_wrote_it(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "snapshots"))
    claim(tmp_path, 0, 20)
    for step, attempt in ((20, 1), (25, 2), (30, 1)):
        save(store, step, provenance=of(attempt))
    assert overtaken(store, records(str(tmp_path))) == [30]
    rewind(str(tmp_path), store, 30, str(tmp_path / "memory"), print)
    assert overtaken(store, records(str(tmp_path))) == []
    assert Newest.of(store).step == 30


def test_an_attempts_number_is_above_those_in_the_snapshots(tmp_path: Path) -> None:
    """run.dir may be another one than that in which the snapshots were made: snapshot.dir is elsewhere."""
    assert Attempt.claim(str(tmp_path), 40, "d", parent=5).number == 6


def test_the_newest_attempt_replaces_what_an_older_one_committed_late_at_its_step(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "snapshots"))
    _, second = claim(tmp_path, 0, 20)
    save(store, 40, state_of(1), provenance=of(1))
    digest = SnapshotWriter(store, ALONE, Retention(9), of(2), print, claim=second).save(40, state_of(2))
    assert Newest.of(store).digest == digest


@pytest.mark.slow
def test_two_starts_at_once_on_one_bucket_are_two_attempts_and_the_older_one_ends(
    serve: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both look before either writes."""
    run = f"{serve('moto').url}/run"
    monkeypatch.setattr("mingpt.snapshot.attempts.newest_number", lambda run_dir: 0)
    first, second = (Attempt.claim(run, 0, None) for _ in range(2))
    assert [first.number, second.number] == [1, 2]
    second.check()
    with pytest.raises(Superseded):
        first.check()


# --- the memory of a node ---


class Tiers:
    """A run's two tiers."""

    def __init__(self, folder: Path) -> None:
        self.durable = Store(str(folder / "snapshots"))
        self.memory = Store(str(folder / "memory"), "snapshot.hot_dir")
        self.run = str(folder)

    def stale(self) -> list[int]:
        return stale_steps(self.memory, Newest.of(self.durable, records(self.run)))

    def restored(self) -> int:
        take = restore(self.durable, self.memory, ALONE, print, Newest.of(self.durable), lambda manifest: ignore)
        assert take
        return take.manifest.step


def ignore(kind: Kind, tensors: dict[str, Tensor]) -> None:
    pass


@pytest.fixture
def tiers(tmp_path: Path) -> Tiers:
    return Tiers(tmp_path)


@pytest.mark.parametrize(
    ("newest", "attempt", "lr", "continues"),
    [
        (7, 1, 0.1, True),  # what it grew from is still the newest
        (8, 2, 0.1, True),  # its own attempt has committed since, and died before it noted that
        (8, 3, 0.2, True),  # another attempt, with the same settings: the same bits
        (8, 3, 0.1, False),  # another attempt, with other settings: it has been overtaken
        (6, 1, 0.1, False),  # what it grew from is gone: somebody went back
    ],
)
def test_memory_continues_what_is_durable_or_is_removed(
    tiers: Tiers, newest: int, attempt: int, lr: float, continues: bool
) -> None:
    """Attempt 2 went on from the durable step 7 and left step 9 in a node's memory."""
    save(tiers.memory, 9, provenance=of(2, 0.2))
    HotBase(2, 7, save(Store(f"{tiers.run}/elsewhere"), 7)).write(tiers.memory)
    save(tiers.durable, newest, provenance=of(attempt, lr))
    assert tiers.restored() == (9 if continues else newest)
    assert tiers.memory.steps() == ([9] if continues else [])


def test_a_damaged_hot_snapshot_is_set_aside_for_the_durable_one(tiers: Tiers) -> None:
    HotBase(1, 7, save(tiers.durable, 7)).write(tiers.memory)
    save(tiers.memory, 9)
    next(Path(tiers.memory.folder(9)).glob("optimizer-*")).write_bytes(b"damaged")
    assert tiers.restored() == 7
    assert tiers.memory.steps() == []
    assert [file.was_damaged for file in tiers.memory.files(9)].count(True) == 1


def test_memory_that_grew_from_other_bits_of_the_same_step_is_removed(tiers: Tiers) -> None:
    save(tiers.memory, 9)
    HotBase(1, 7, "0" * 64).write(tiers.memory)
    save(tiers.durable, 7)
    assert tiers.stale() == [9]


def test_memory_that_grew_from_a_snapshot_that_is_damaged_now_is_needed_most(tiers: Tiers) -> None:
    save(tiers.durable, 5)
    HotBase(1, 7, save(tiers.durable, 7)).write(tiers.memory)
    save(tiers.memory, 9)
    Path(tiers.durable.folder(7), "manifest.json").write_bytes(b"{")
    assert tiers.stale() == []
    tiers.durable.set_aside(7)
    assert tiers.stale() == []


def test_memory_without_anything_durable_counts_only_if_nothing_ever_was(tiers: Tiers) -> None:
    save(tiers.memory, 9)
    assert tiers.stale() == [9]  # of an older version of this program: no note
    HotBase(1, 0, None).write(tiers.memory)
    assert tiers.stale() == []
    HotBase(1, 7, "0" * 64).write(tiers.memory)
    assert tiers.stale() == [9]


# --- going back ---


def test_a_rewind_on_another_machine_is_not_undone_by_a_nodes_memory(tmp_path: Path, tiers: Tiers) -> None:
    """Nothing durable is newer than the step that somebody goes back to, and the memory continues just that."""
    claim(tmp_path, 0)
    HotBase(1, 30, save(tiers.durable, 30)).write(tiers.memory)
    save(tiers.memory, 38)
    assert tiers.stale() == []
    rewind(tiers.run, tiers.durable, 30, str(tmp_path / "another machine's"), print)
    assert tiers.stale() == [38]
    HotBase(3, 35, save(tiers.durable, 35, provenance=of(3))).write(tiers.memory)
    assert tiers.stale() == []


def test_a_rewind_sets_all_newer_snapshots_aside_in_both_tiers(tmp_path: Path, told: Told, capsys: Captured) -> None:
    run, store = str(tmp_path / "run"), Store(str(tmp_path / "run/snapshots"))
    [training] = claim(tmp_path / "run", 0)
    for step in (10, 20, 30):
        save(store, step)
    memory = hot.open_hot(str(tmp_path), run, hot.run_id(run), 10)
    save(memory, 35)
    capsys.readouterr()
    assert snapshots.main(["rewind", run, "--step", "15", "--hot-dir", str(tmp_path)]) == 64
    assert snapshots.main(["rewind", run, "--step", "10", "--hot-dir", str(tmp_path)]) == 0
    told("".join(capsys.readouterr()), memory.root, tmp_path)
    assert (store.steps(), memory.steps()) == ([10], [])
    assert [file.was_rewound for file in memory.files(35)].count(True) == 1
    with pytest.raises(Superseded, match="the run was rewound"):
        training.check()
