"""What follows from what: late commits, two starts at once, going back, and what a node's memory may bring back."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from mingpt.errors import Superseded
from mingpt.snapshot.attempts import Attempt, records
from mingpt.snapshot.format import MANIFEST, Manifest
from mingpt.snapshot.lineage import NOTE, HotBase, NewestDurable, overtaken, set_overtaken_aside, stale_steps
from mingpt.snapshot.store import Store
from mingpt.tiers import hot
from mingpt.tiers.rewinding import rewind
from tests.kits.snapshot_kit import PROVENANCE, read_newest, save, state_of
from tests.kits.told import Told
from tests.kits.verb_kit import mingpt


def of(attempt: int, lr: float = 0.1, start: int = 0) -> dict[str, Any]:
    """The provenance of an attempt's snapshots. The section `world` does not enter the result."""
    config = {"optimizer": {"lr": lr}, "world": {"size": attempt}}
    return PROVENANCE | {"config": config, "history": [{"attempt": attempt, "from_step": start}]}


class Line:
    """A run, its two tiers, and attempts that claim and commit as real ones do, without the training."""

    def __init__(self, folder: Path) -> None:
        self.dir = str(folder)
        self.durable = Store(f"{folder}/snapshots")
        self.memory = Store(f"{folder}/memory", "snapshot.hot_dir")

    def claim(self, *starts: int) -> list[Attempt]:
        """The next attempts, which went on from these steps."""
        return [Attempt.claim(self.dir, start, None) for start in starts]

    def commit(self, steps: dict[int, int]) -> None:
        """Which attempt commits which step."""
        claims = records(self.dir)
        for step, attempt in steps.items():
            start = claims[attempt].from_step if attempt in claims else 0
            save(self.durable, step, provenance=of(attempt, start=start))

    def overtaken(self) -> list[int]:
        return overtaken(self.durable, records(self.dir))

    def newest(self) -> NewestDurable:
        return NewestDurable.of(self.durable, records(self.dir))

    def stale(self) -> list[int]:
        return stale_steps(self.memory, self.newest())

    def restored(self) -> int:
        snapshot = read_newest(self.durable, print, self.memory, self.newest())
        return snapshot.manifest.step if snapshot else 0

    def grew_from(self, step: int, digest: str | None, attempt: int = 1) -> None:
        """What the memory has continues this durable step."""
        HotBase(attempt, step, digest).write(self.memory)


@pytest.fixture
def line(tmp_path: Path) -> Line:
    return Line(tmp_path)


# --- claims ---


def test_of_attempts_that_start_at_once_each_has_a_number_of_its_own(line: Line) -> None:
    together = threading.Barrier(8)

    def start(_: int) -> int:
        together.wait()
        return line.claim(0)[0].number

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(start, range(8))) == [*range(1, 9)] == sorted(records(line.dir))


def test_an_older_attempt_is_told_that_a_newer_one_has_started(line: Line, told: Told) -> None:
    """Also if nothing but the number of the newer one's claim can be read."""
    first, second = line.claim(0, 20)
    with told.mistake(line.dir, of=Superseded):
        first.check()
    second.check()
    assert records(line.dir)[2] == second.record
    for content in (b"", b"[]", b"{}", b'{"id": 1}', b"\xff", b"[" * 100_000):
        Path(line.dir, "attempts/00007.json").write_bytes(content)
        assert list(records(line.dir)) == [1, 2]
        with pytest.raises(Superseded, match="attempt 7 has started"):
            second.check()


@pytest.mark.parametrize(("heeded", "numbers"), [(True, [1, 2]), (False, [1, 1])])
def test_two_starts_at_once_on_one_bucket_are_two_attempts_and_the_older_one_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heeded: bool, numbers: list[int]
) -> None:
    """Both look before either writes. Some stores do not heed conditional puts, which is found out."""
    run, plain = f"memory://{tmp_path}", MemoryFileSystem.pipe_file
    if not heeded:
        monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda fs, path, value, mode="": plain(fs, path, value))
    assert Store(run).conditional_puts == heeded
    monkeypatch.setattr("mingpt.snapshot.attempts.newest_number", lambda run_dir: 0)
    first, second = (Attempt.claim(run, 0, None) for _ in range(2))
    assert [first.number, second.number] == numbers
    second.check()
    with pytest.raises(Superseded, match="has started while this attempt, number 1"):
        first.check()


# --- the durable line ---


@pytest.mark.parametrize(
    ("starts", "commits", "late"),
    [
        ([0, 20], {20: 1, 29: 2, 36: 2, 38: 1, 40: 1}, [40, 38]),  # attempt 1 woke up while 2 went on from step 20
        ([0, 20], {20: 1, 40: 1}, []),  # the newer one has committed nothing
        ([0, 20], {20: 1, 25: 2, 30: 1, 35: 2}, [30]),  # between the newer one's steps
        ([0, 20], {20: 1, 21: 1, 30: 2}, [21]),  # the step after that which the newer one began with
    ],
)
def test_the_newest_attempts_snapshots_are_the_line_and_not_the_highest_step(
    line: Line, starts: list[int], commits: dict[int, int], late: list[int]
) -> None:
    line.claim(*starts)
    line.commit(commits)
    assert line.overtaken() == late
    # run.dir may be lost, and with it the claims; snapshot.dir is elsewhere.
    assert overtaken(line.durable, {}) == late
    set_overtaken_aside(line.durable, records(line.dir), print)
    assert line.durable.steps() == sorted(commits.keys() - set(late), reverse=True)
    assert all(any(file.is_set_aside for file in line.durable.files(step)) for step in late)


class Slow(Store):
    """While this store commits, a newer attempt starts at step 20 and commits."""

    def __init__(self, line: Line, commits: int) -> None:
        super().__init__(line.durable.root)
        self.line, self.commits = line, commits

    def commit(self, manifest: Manifest) -> bool:
        self.line.claim(20)
        self.line.commit({self.commits: 2})
        return super().commit(manifest)


@pytest.mark.parametrize(("step", "newer"), [(40, 36), (30, 30)])
def test_an_attempt_that_is_overtaken_during_its_commit_ends_and_takes_nothing_from_the_newer_one(
    line: Line, step: int, newer: int
) -> None:
    """Where both commit the same bits of the same step, the newer one may have ended with 0 already."""
    line.commit({20: 1})
    [first] = line.claim(0)
    with pytest.raises(Superseded, match="attempt 2 has started"):
        save(Slow(line, newer), step, provenance=of(1), claim=first)
    set_overtaken_aside(line.durable, records(line.dir), print)
    assert line.durable.steps() == [newer, 20]


def test_a_step_that_somebody_went_back_to_is_on_the_line_and_nothing_that_is_committed_late(line: Line) -> None:
    line.claim(0, 20)
    line.commit({20: 1, 25: 2, 30: 1})
    assert line.overtaken() == [30]
    rewind(line.dir, line.durable, 30, line.memory.root, print)
    assert line.overtaken() == []
    line.commit({40: 2})
    assert line.overtaken() == [40]


def test_an_attempts_number_is_above_those_in_the_snapshots(tmp_path: Path) -> None:
    """run.dir may be another one than that in which the snapshots were made: snapshot.dir is elsewhere."""
    assert Attempt.claim(str(tmp_path), 40, "d", parent=5).number == 6


def test_the_newest_attempt_replaces_what_an_older_one_committed_late_and_what_is_damaged(line: Line) -> None:
    _, second = line.claim(0, 20)
    line.commit({40: 1, 41: 2})
    Path(line.durable.folder(41), MANIFEST).write_bytes(b"{")
    for step in (40, 41):
        assert save(line.durable, step, state_of(2), provenance=of(2), claim=second) == line.newest().digest
        assert [file.is_set_aside for file in line.durable.files(step)].count(True) == 1


# --- the memory of a node ---


@pytest.mark.parametrize(
    ("newest", "attempt", "lr", "shift", "continues"),
    [
        (7, 1, 0.1, 0, True),  # what it grew from is still the newest
        (7, 1, 0.1, 1, False),  # the same step with other bits
        (8, 2, 0.1, 0, True),  # its own attempt has committed since, and died before it noted that
        (8, 3, 0.2, 0, True),  # another attempt, with the same settings: the same bits
        (8, 3, 0.1, 0, False),  # another attempt, with other settings: it has been overtaken
        (6, 1, 0.1, 0, False),  # what it grew from is gone: somebody went back
    ],
)
def test_memory_continues_what_is_durable_or_is_removed(
    line: Line, newest: int, attempt: int, lr: float, shift: int, continues: bool
) -> None:
    """Attempt 2 went on from the durable step 7 and left step 9 in a node's memory."""
    save(line.memory, 9, provenance=of(2, 0.2))
    line.grew_from(7, save(Store(f"{line.dir}/elsewhere"), 7), attempt=2)
    save(line.durable, newest, state_of(newest + shift), provenance=of(attempt, lr))
    assert line.restored() == (9 if continues else newest)
    assert line.memory.steps() == ([9] if continues else [])


def test_a_damaged_hot_snapshot_is_set_aside_for_the_durable_one(line: Line) -> None:
    line.grew_from(7, save(line.durable, 7))
    save(line.memory, 9)
    next(Path(line.memory.folder(9)).glob("optimizer-*")).write_bytes(b"damaged")
    assert line.restored() == 7
    assert [file.was_damaged for file in line.memory.files(9)].count(True) == 1


def test_memory_that_grew_from_a_snapshot_that_is_damaged_now_is_needed_most(line: Line) -> None:
    save(line.durable, 5)
    line.grew_from(7, save(line.durable, 7))
    save(line.memory, 9)
    Path(line.durable.folder(7), "manifest.json").write_bytes(b"{")
    assert line.stale() == []
    line.durable.set_aside(7)
    assert line.stale() == []


def test_memory_without_anything_durable_counts_only_if_nothing_ever_was(line: Line) -> None:
    save(line.memory, 9)
    assert line.stale() == [9]  # of an older version of this program: no note
    line.grew_from(0, None)
    assert line.stale() == []
    line.grew_from(7, "0" * 64)
    assert line.stale() == [9]


# --- going back ---


def test_a_rewind_on_another_machine_is_not_undone_by_a_nodes_memory(line: Line) -> None:
    """Nothing durable is newer than the step that somebody goes back to, and the memory continues just that."""
    line.claim(0)
    line.grew_from(30, save(line.durable, 30))
    save(line.memory, 38)
    assert line.stale() == []
    rewind(line.dir, line.durable, 30, f"{line.dir}/another machine's", print)
    assert line.stale() == [38]
    line.grew_from(35, save(line.durable, 35, provenance=of(3)), attempt=3)
    assert line.stale() == []


def test_a_rewind_sets_all_newer_snapshots_aside_in_both_tiers(line: Line, tmp_path: Path) -> None:
    [training] = line.claim(0)
    line.commit({10: 1, 20: 1, 30: 1})
    memory = hot.open_hot(str(tmp_path), line.dir, hot.run_id(line.dir), 10)
    save(memory, 35)
    words = f"snapshots rewind {line.dir} --hot-dir {tmp_path} --step"
    assert "30, 20, 10" in mingpt.refused(f"{words} 15")
    mingpt(f"{words} 10")
    assert (line.durable.steps(), memory.steps()) == ([10], [])
    assert [file.was_rewound for file in memory.files(35)].count(True) == 1
    with pytest.raises(Superseded, match="rewound"):
        training.check()


NO_NOTES = (
    b"", b"{", b"[]", b"{}", b"null", b"\xff", b"[" * 100_000, b" " * 2**20 + b"%b",
    b'{"attempt": null, "step": 4, "digest": "%d"}', b'{"attempt": true, "step": 4, "digest": "%d"}',
    b'{"attempt": "1", "step": 4, "digest": "%d"}', b'{"attempt": 1.0, "step": 4, "digest": "%d"}',
    b'{"attempt": 1, "step": -4, "digest": "%d"}', b'{"attempt": 1, "step": 4, "digest": 4}',
    b'{"attempt": 1, "step": [4], "digest": "%d"}', b'{"attempt": 1, "digest": "%d"}',
)  # fmt: skip


@pytest.mark.parametrize("what", [os.mkfifo, lambda note: note.symlink_to("good"), *NO_NOTES])
def test_a_note_in_memory_that_is_none_ends_no_start(line: Line, what: Callable[[Path], object] | bytes) -> None:
    """It may be anything: what hot snapshots continue is not known then, and the durable one is taken."""
    line.commit({4: 1})
    save(line.memory, 6, provenance=of(1))
    line.grew_from(4, line.newest().digest)
    assert line.stale() == []
    note = Path(line.memory.root, NOTE)
    good = note.rename(note.with_name("good")).read_bytes()
    if isinstance(what, bytes):
        note.write_bytes(what.replace(b"%b", good).replace(b"%d", str(line.newest().digest).encode()))
    else:
        what(note)
    assert line.stale() == [6]
    assert line.restored() == 4
    save(line.memory, 6, provenance=of(1))
    line.grew_from(4, line.newest().digest)
    assert line.stale() == []
