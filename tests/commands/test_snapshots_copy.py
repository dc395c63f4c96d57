"""`mingpt snapshots copy`: verified, the manifest last, replacing nothing, mixing no two runs, and going on."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from mingpt.commands import snapshots
from mingpt.observe.jsonl import MetricsLog, read_metrics
from mingpt.snapshot.attempts import Attempt, newest_number
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Buffer, Store
from snapshot_kit import PROVENANCE, equal, files, save, signed, state_of

Captured = pytest.CaptureFixture[str]
STEPS = (4, 10, 20, 30)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with four snapshots, and what a writer of step 25 left when it was killed."""
    store = Store(f"{tmp_path}/run/snapshots")
    for step in (*STEPS, 25):
        save(store, step)
    Path(store.folder(25), "manifest.json").unlink()
    return tmp_path / "run"


@pytest.fixture(params=["local", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/other" if request.param == "local" else f"memory://{uuid4().hex}/other"


def store(run: object) -> Store:
    return Store(f"{run}/snapshots")


def copy(*arguments: object) -> int:
    return snapshots.main(["copy", *map(str, arguments)])


def part(run: Path, step: int) -> Path:
    return next(run.glob(f"snapshots/step-{step:09d}/model-*"))


def flip(path: Path) -> None:
    """Of the right size."""
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


@pytest.mark.parametrize("below", ["", "/snapshots"])
def test_copy_takes_a_run_to_another_store(run: Path, target: str, capsys: Captured, below: str) -> None:
    assert copy(f"{run}{below}", f"{target}{below}") == 0
    assert store(target).folders() == [30, 20, 10, 4]
    for step in STEPS:
        assert equal(read(store(target), step).state, state_of(step))
        assert store(target).read_manifest(step) == store(run).read_manifest(step)
    # Again: nothing is left to do.
    capsys.readouterr()
    assert copy(f"{run}{below}", f"{target}{below}") == 0
    assert capsys.readouterr().out.count("is there already") == 4


@pytest.mark.parametrize("last", ["", "/", "/snapshots", "/snapshots/step-000000020"])
def test_copy_takes_one_step(run: Path, tmp_path: Path, last: str) -> None:
    source, one = f"{run}/snapshots/step-000000020", f"{tmp_path}/one/snapshots"
    assert copy(source, f"{tmp_path}/one{last}") == 0
    assert store(tmp_path / "one").folders() == [20]  # where a run of run.dir=one looks for it
    assert copy(source, f"{one}/step-000000021") == copy(run, f"{one}/step-000000020") == 64
    assert files(tmp_path / "one") == [f"snapshots/step-000000020/{name}" for name in files(Path(source))]


def test_copy_overwrites_nothing_and_says_so_before_it_writes(run: Path, tmp_path: Path, capsys: Captured) -> None:
    theirs = store(tmp_path / "theirs")
    save(theirs, 10, state_of(11))
    save(theirs, 20)
    Path(theirs.folder(20), "manifest.json").write_text("{}")
    capsys.readouterr()
    assert copy(run, tmp_path / "theirs") == 64
    out, err = capsys.readouterr()
    assert (out, "step 10" in err, "step 20" in err, "step 4" in err) == ("", True, True, False)
    assert theirs.folders() == [20, 10]
    assert read(theirs, 10).manifest.digest != read(store(run), 10).manifest.digest


def test_copy_verifies_and_writes_the_manifest_last(
    run: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(part(run, 20))
    assert copy(run, tmp_path / "copy") == 1
    assert f"step 20: DAMAGED, not copied: {run}" in capsys.readouterr().out
    assert store(tmp_path / "copy").steps() == [30, 10, 4]
    written, write, commit = list[str](), Store.write, Store.commit

    def watched_write(store: Store, step: int, name: str, pieces: Sequence[Buffer]) -> None:
        written.append(name.partition("-")[0])
        write(store, step, name, pieces)

    def watched_commit(store: Store, step: int, manifest: bytes) -> bool:
        written.append("manifest")
        return commit(store, step, manifest)

    monkeypatch.setattr(Store, "write", watched_write)
    monkeypatch.setattr(Store, "commit", watched_commit)
    assert copy(f"{run}@10", tmp_path / "third") == 0
    assert written == ["model", "optimizer", "manifest"]


@pytest.mark.parametrize("damage", [Path.unlink, flip])
def test_copy_repairs_a_copy(run: Path, tmp_path: Path, capsys: Captured, damage: Callable[[Path], None]) -> None:
    assert copy(run, tmp_path / "copy") == 0
    damage(part(tmp_path / "copy", 30))
    capsys.readouterr()
    assert copy(run, tmp_path / "copy") == 0
    assert capsys.readouterr().out.count("is there already") == 3
    assert equal(read(store(tmp_path / "copy"), 30).state, state_of(30))


def test_copy_passes_over_a_snapshot_of_another_format(run: Path, tmp_path: Path) -> None:
    path = run / "snapshots/step-000000030/manifest.json"
    path.write_bytes(signed(json.loads(path.read_bytes()) | {"format": 4}))
    assert copy(run, tmp_path / "copy") == 64
    assert store(tmp_path / "copy").steps() == [20, 10, 4]


def test_copy_brings_the_metrics_along(run: Path, tmp_path: Path, target: str) -> None:
    for attempt in (1, 2):
        log = MetricsLog(str(run), attempt, print)
        log.write({"step": attempt, "loss": 1.0})
        log.file.close()
    (run / "metrics/notes.txt").write_text("mine")
    fork = tmp_path / "fork"
    assert copy(f"{run}@20", fork) == copy(run, target) == 0
    assert read_metrics(str(run)) == read_metrics(str(fork)) == read_metrics(target)
    assert newest_number(str(fork)) == newest_number(target) == 2
    assert files(fork / "metrics") == ["attempt-00001.jsonl", "attempt-00002.jsonl"]
    # What is there stays, and a copy that has no run around it gets none.
    (fork / "metrics/attempt-00002.jsonl").write_text("")
    save(Store(f"{tmp_path}/bare"), 1)
    assert copy(run, fork) == copy(run, tmp_path / "bare") == 0
    assert (fork / "metrics/attempt-00002.jsonl").read_text() == ""
    assert Store(f"{tmp_path}/bare").steps() == [30, 20, 10, 4, 1]
    assert not (tmp_path / "metrics").exists()
    (run / "metrics/attempt-00003.jsonl").symlink_to(tmp_path / "secret")
    assert copy(run, tmp_path / "third") == 64


# --- other runs ---


def of_run(name: str, *ats: str) -> dict[str, Any]:
    """What the manifests of a run say whose attempts began at these times."""
    history = [{"attempt": number, "at": at} for number, at in enumerate(ats, 1)]
    return {**PROVENANCE, "run": name, "history": history}


OTHERS = [of_run("theirs", "09:00"), {**of_run("mine", "10:00"), "config": {"seed": 2}}]


@pytest.mark.parametrize("provenance", OTHERS, ids=["another start", "other settings"])
def test_a_place_with_snapshots_of_another_run_is_refused(
    run: Path, target: str, capsys: Captured, provenance: dict[str, Any]
) -> None:
    save(store(run), 31, provenance=of_run("mine", "10:00"))
    save(store(target), 2, provenance=provenance)
    (run / "metrics").mkdir()
    (run / "metrics/attempt-00001.jsonl").write_text("{}\n")
    capsys.readouterr()
    assert copy(run, target) == 64
    out, err = capsys.readouterr()
    assert (out, f"{target}/snapshots: step 2" in err) == ("", True)
    assert store(target).folders() == [2]
    assert not Store(f"{target}/metrics").files(None)


def test_a_fork_that_has_gone_on_takes_no_more_steps_and_says_no_to_none_that_it_has(
    tmp_path: Path, target: str
) -> None:
    for step in (2, 4):
        save(store(tmp_path), step, provenance=of_run("mine", "10:00"))
    assert copy(tmp_path, target, "--step=2") == 0
    save(store(target), 3, provenance=of_run("fork", "10:00", "11:00"))
    assert copy(tmp_path, target, "--step=2") == 0  # a script that copies and trains is started again
    assert copy(tmp_path, target) == 64
    assert store(target).folders() == [3, 2]


def test_a_run_that_has_gone_on_and_deleted_what_was_copied_is_copied_again(tmp_path: Path, target: str) -> None:
    save(store(tmp_path), 2, provenance=of_run("mine", "10:00"))
    assert copy(tmp_path, target) == 0
    save(store(tmp_path), 4, provenance=of_run("mine", "10:00", "11:00"))
    store(tmp_path).delete(2)
    assert copy(tmp_path, target) == copy(target, tmp_path) == 0  # and back
    assert store(target).folders() == store(tmp_path).folders() == [4, 2]


def test_a_run_that_has_lost_its_snapshots_gets_them_back(run: Path, target: str) -> None:
    """Its own attempts are there, which began from nothing, and the copy has none."""
    Attempt.claim(target, 0, None)
    assert copy(run, target) == 0
    assert store(target).steps() == [30, 20, 10, 4]
