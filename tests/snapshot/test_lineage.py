"""What follows from what: late commits, two starts at once, going back, and what a node's memory may bring back."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from mingpt.commands import snapshots
from mingpt.errors import Superseded
from mingpt.snapshot import hot
from mingpt.snapshot.attempts import REWIND, Attempt, records
from mingpt.snapshot.lineage import HotBase, Newest, overtaken, set_overtaken_aside, stale_steps
from mingpt.snapshot.restore import restore
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.rewinding import rewind
from mingpt.snapshot.store import Store
from mingpt.snapshot.writer import SnapshotWriter
from snapshot_kit import ALONE, PROVENANCE, save, state_of
from store_kit import Stores


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
    assert sorted(got) == list(range(1, 9))
    assert sorted(p.name for p in (tmp_path / "attempts").iterdir()) == [f"{n:05d}.json" for n in range(1, 9)]


def test_an_older_attempt_is_told_that_a_newer_one_has_started(tmp_path: Path) -> None:
    first, second = claim(tmp_path, 0, 20)
    with pytest.raises(Superseded) as end:
        first.check()
    assert str(end.value) == (
        f"run.dir={tmp_path}: attempt 2 has started while this attempt, number 1, was still training: this one ends "
        f"here, and the newer one goes on; two runs need two places"
    )
    second.check()
    assert records(str(tmp_path))[2] == second.record


def test_where_both_could_take_one_number_the_last_one_to_write_has_it(tmp_path: Path) -> None:
    """As on a store that does not heed conditional puts."""
    [first] = claim(tmp_path, 0)
    shutil.rmtree(tmp_path / "attempts")
    [second] = claim(tmp_path, 0)
    assert first.number == second.number == 1
    second.check()
    with pytest.raises(Superseded, match="attempt 1 has started while this attempt, number 1, was still"):
        first.check()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"id": 1}', b"\xff", b"[" * 100_000])
def test_a_claim_that_cannot_be_read_says_nothing_but_its_number(tmp_path: Path, content: bytes) -> None:
    [first] = claim(tmp_path, 0)
    (tmp_path / "attempts/00007.json").write_bytes(content)
    assert list(records(str(tmp_path))) == [1]
    with pytest.raises(Superseded, match="attempt 7 has started"):
        first.check()


# --- the durable line ---


def test_the_newest_attempts_snapshots_are_the_line_and_not_the_highest_step(tmp_path: Path) -> None:
    """Attempt 1 woke up and committed step 40 while attempt 2 went on from step 20 to 36."""
    store = Store(str(tmp_path / "snapshots"))
    claim(tmp_path, 0, 20)
    for step, attempt in ((20, 1), (29, 2), (36, 2), (38, 1), (40, 1)):
        save(store, step, provenance=of(attempt))
    said: list[str] = []
    set_overtaken_aside(store, records(str(tmp_path)), said.append)
    assert store.steps() == [36, 29, 20]
    assert [line.split(" in ")[0] for line in said] == ["the snapshot of step 40", "the snapshot of step 38"]
    assert len(list((tmp_path / "snapshots/step-000000040").glob("set-aside-overtaken-*"))) == 1
    assert Newest.of(store).step == 36


def test_what_an_older_attempt_committed_late_stays_if_the_newer_one_has_committed_nothing(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "snapshots"))
    claim(tmp_path, 0, 20)
    save(store, 20, provenance=of(1))
    save(store, 40, provenance=of(1))
    assert overtaken(store, records(str(tmp_path))) == []


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
    """While this store commits, something else happens."""

    def __init__(self, url: str, meanwhile: Any) -> None:
        super().__init__(url)
        self.meanwhile = meanwhile

    def commit(self, step: int, manifest: bytes) -> bool:
        self.meanwhile()
        return super().commit(step, manifest)


def test_an_attempt_that_is_overtaken_during_its_commit_ends_and_the_next_start_sets_it_aside(tmp_path: Path) -> None:
    url = str(tmp_path / "snapshots")
    save(Store(url), 20, provenance=of(1))
    [first] = claim(tmp_path, 0)

    def overtake() -> None:
        claim(tmp_path, 20)
        save(Store(url), 36, provenance=of(2))

    writer = SnapshotWriter(Slow(url, overtake), ALONE, Retention(9), of(1), print, claim=first)
    with pytest.raises(Superseded, match="attempt 2 has started"):
        writer.save(40, state_of(40))
    assert writer.broken
    set_overtaken_aside(Store(url), records(str(tmp_path)), print)
    assert Store(url).steps() == [36, 20]


def test_an_attempt_that_is_overtaken_takes_nothing_from_the_newer_one(tmp_path: Path) -> None:
    """Both commit the same bits of the same step: the newer one may have ended with 0 already."""
    url = str(tmp_path / "snapshots")
    save(Store(url), 20, provenance=of(1))
    [first] = claim(tmp_path, 0)

    def overtake() -> None:
        claim(tmp_path, 20)
        save(Store(url), 30, provenance=of(2))

    with pytest.raises(Superseded):
        SnapshotWriter(Slow(url, overtake), ALONE, Retention(9), of(1), print, claim=first).save(30, state_of(30))
    set_overtaken_aside(Store(url), records(str(tmp_path)), print)
    assert Store(url).steps() == [30, 20]


def test_what_an_overtaken_attempt_left_between_the_newer_ones_steps_goes_too(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "snapshots"))
    claim(tmp_path, 0, 20)
    for step, attempt in ((20, 1), (25, 2), (30, 1), (35, 2)):
        save(store, step, provenance=of(attempt))
    assert overtaken(store, records(str(tmp_path))) == [30]


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
    said: list[str] = []
    digest = SnapshotWriter(store, ALONE, Retention(9), of(2), said.append, claim=second).save(40, state_of(2))
    assert Newest.of(store).digest == digest
    assert said == [
        f"step 40 of {store.url} is there, from attempt 1, with another digest: that attempt was overtaken; its "
        f"snapshot is set aside"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "numbers"), [("moto", [1, 2]), ("proxied", [1, 1])])
def test_two_starts_at_once_on_one_bucket_are_two_attempts_and_the_older_one_ends(
    serve: Stores, monkeypatch: pytest.MonkeyPatch, kind: str, numbers: list[int]
) -> None:
    """Both look before either writes. moto heeds conditional puts; its proxy drops their condition."""
    run = f"{serve(kind).url}/run"
    monkeypatch.setattr("mingpt.snapshot.attempts.newest_number", lambda run_dir: 0)
    first, second = (Attempt.claim(run, 0, None) for _ in range(2))
    assert [first.number, second.number] == numbers
    second.check()
    with pytest.raises(Superseded, match="has started while this attempt, number 1"):
        first.check()


# --- the memory of a node ---


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
    tmp_path: Path, newest: int, attempt: int, lr: float, continues: bool
) -> None:
    """Attempt 2 went on from the durable step 7 and left step 9 in a node's memory."""
    durable, memory = Store(str(tmp_path / "durable")), Store(str(tmp_path / "memory"), "snapshot.hot_dir")
    save(memory, 9, provenance=of(2, 0.2))
    seven = save(Store(str(tmp_path / "elsewhere")), 7)
    HotBase(2, 7, seven).write(memory)
    save(durable, newest, provenance=of(attempt, lr))
    said: list[str] = []
    loaded = restore(
        durable, memory, ALONE, said.append, Newest.of(durable), lambda manifest: lambda kind, tensors: None
    )
    assert loaded
    assert loaded.manifest.step == (9 if continues else newest)
    assert memory.steps() == ([9] if continues else [])
    assert [line.split(" does not")[0] for line in said] == ([] if continues else ["the hot snapshot of step 9"])


def test_memory_that_grew_from_other_bits_of_the_same_step_is_removed(tmp_path: Path) -> None:
    durable, memory = Store(str(tmp_path / "durable")), Store(str(tmp_path / "memory"), "snapshot.hot_dir")
    save(memory, 9)
    HotBase(1, 7, "0" * 64).write(memory)
    save(durable, 7)
    assert stale_steps(memory, Newest.of(durable)) == [9]


def test_memory_that_grew_from_a_snapshot_that_is_damaged_now_is_needed_most(tmp_path: Path) -> None:
    durable, memory = Store(str(tmp_path / "durable")), Store(str(tmp_path / "memory"), "snapshot.hot_dir")
    save(durable, 5)
    HotBase(1, 7, save(durable, 7)).write(memory)
    save(memory, 9)
    (tmp_path / "durable/step-000000007/manifest.json").write_bytes(b"{")
    assert Newest.of(durable).unreadable == (7,)
    assert stale_steps(memory, Newest.of(durable)) == []
    durable.set_aside(7)
    assert stale_steps(memory, Newest.of(durable)) == []


def test_memory_without_anything_durable_counts_only_if_nothing_ever_was(tmp_path: Path) -> None:
    durable, memory = Store(str(tmp_path / "durable")), Store(str(tmp_path / "memory"), "snapshot.hot_dir")
    save(memory, 9)
    assert stale_steps(memory, Newest.of(durable)) == [9]  # of an older version of this program: no note
    HotBase(1, 0, None).write(memory)
    assert stale_steps(memory, Newest.of(durable)) == []
    HotBase(1, 7, "0" * 64).write(memory)
    assert stale_steps(memory, Newest.of(durable)) == [9]


# --- going back ---


def test_a_rewind_on_another_machine_is_not_undone_by_a_nodes_memory(tmp_path: Path) -> None:
    """Nothing durable is newer than the step that somebody goes back to, and the memory continues just that."""
    run, durable = str(tmp_path), Store(str(tmp_path / "snapshots"))
    memory = Store(str(tmp_path / "memory"), "snapshot.hot_dir")
    claim(tmp_path, 0)
    HotBase(1, 30, save(durable, 30)).write(memory)
    save(memory, 38)
    assert stale_steps(memory, Newest.of(durable, records(run))) == []
    rewind(run, durable, 30, str(tmp_path / "another machine's"), print)
    assert stale_steps(memory, Newest.of(durable, records(run))) == [38]
    save(durable, 35, provenance=of(3))
    assert stale_steps(memory, Newest.of(durable, records(run))) == [38]
    HotBase(3, 35, Newest.of(durable).digest).write(memory)
    assert stale_steps(memory, Newest.of(durable, records(run))) == []


def test_a_rewind_sets_all_newer_snapshots_aside_in_both_tiers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, store = str(tmp_path / "run"), Store(str(tmp_path / "run/snapshots"))
    [training] = claim(tmp_path / "run", 0)
    digests = {step: save(store, step) for step in (10, 20, 30)}
    memory = hot.open_hot(str(tmp_path), run, hot.run_id(run), 10)
    save(memory, 35)
    assert snapshots.main(["rewind", run, "--step", "15", "--hot-dir", str(tmp_path)]) == 64
    assert "there is no snapshot of step 15: choose one of those that there are (30, 20, 10)" in capsys.readouterr().err
    assert snapshots.main(["rewind", run, "--step", "10", "--hot-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in out] == [
        "step 30", "step 20", "step 35", f"the next attempt starts from step 10, digest {digests[10]}"
    ]  # fmt: skip
    assert store.steps() == [10]
    assert memory.steps() == []
    assert len(list(Path(memory.root).glob("step-000000035/set-aside-rewound-*"))) == 1
    with pytest.raises(Superseded, match="the run was rewound while this attempt, number 1, was still training"):
        training.check()
    assert snapshots.main(["list", run]) == 0
    assert "set aside: was rewound or overtaken" in capsys.readouterr().out
