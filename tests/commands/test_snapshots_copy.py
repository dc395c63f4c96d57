"""`mingpt snapshots copy`: verified, the manifest last, replacing nothing, mixing no two runs, and going on."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from mingpt.metrics import read_metrics
from mingpt.observe.jsonl import MetricsLog
from mingpt.snapshot.attempts import Attempt, newest_number
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from snapshot_kit import PROVENANCE, equal, files, save, state_of
from verb_kit import mingpt, store

pytestmark = pytest.mark.usefixtures("run")
COPY = "snapshots copy"
STEPS = [30, 20, 10, 4]


@pytest.fixture(params=["other", "memory://{}/other"])
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param).format(uuid4().hex)


def part(run: str, step: int) -> Path:
    return next(Path(run).glob(f"snapshots/step-{step:09d}/model-*"))


def flip(path: Path) -> None:
    """Of the right size."""
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def test_copy_takes_a_run_to_another_store(target: str) -> None:
    words = f"{COPY} run/snapshots {target}"
    mingpt(words)
    assert store(target).folders() == STEPS
    for step in STEPS:
        assert equal(read(store(target), step).state, state_of(step))
        assert store(target).read_manifest(step) == store().read_manifest(step)
    assert mingpt(words).count("is there already") == 4


@pytest.mark.parametrize("last", ["", "/snapshots", "/snapshots/step-000000020"])
def test_copy_takes_one_step(last: str, run: Path) -> None:
    source = "run/snapshots/step-000000020"
    mingpt(f"{COPY} {source} one{last}")
    mingpt.refused(f"{COPY} {source} one/snapshots/step-000000021")
    mingpt.refused(f"{COPY} run one/snapshots/step-000000020")
    assert files(Path("one")) == [f"snapshots/step-000000020/{name}" for name in files(Path(source))]


def test_copy_overwrites_nothing_and_says_so_before_it_writes() -> None:
    theirs = store("theirs")
    save(theirs, 10, state_of(11))
    save(theirs, 20)
    Path(theirs.folder(20), "manifest.json").write_text("{}")
    err = mingpt.refused(f"{COPY} run theirs")
    assert [f"step {step}" in err for step in (10, 20, 4)] == [True, True, False]
    assert theirs.folders() == [20, 10]
    assert equal(read(theirs, 10).state, state_of(11))


def test_copy_verifies_and_writes_the_manifest_last(monkeypatch: pytest.MonkeyPatch) -> None:
    flip(part("run", 20))
    assert "step 20: DAMAGED, not copied: run" in mingpt(f"{COPY} run copy", code=1)
    assert store("copy").steps() == [30, 10, 4]
    there = list[str]()
    monkeypatch.setattr(Store, "commit", lambda *_: there.extend(files(Path("third"))))
    mingpt.ends(f"{COPY} run@10 third")
    assert [Path(name).name[:5] for name in there] == ["model", "optim"]


def test_copy_repairs_a_copy() -> None:
    mingpt(f"{COPY} run copy")
    flip(part("copy", 30))
    assert mingpt(f"{COPY} run copy").count("is there already") == 3
    assert equal(read(store("copy"), 30).state, state_of(30))


def test_copy_brings_the_metrics_along(tmp_path: Path, target: str) -> None:
    for attempt in (1, 2):
        log = MetricsLog("run", attempt, print)
        log.write({"step": attempt, "loss": 1.0})
        log.file.close()
    Path("run/metrics/notes.txt").write_text("mine")
    mingpt(f"{COPY} run@20 fork")
    mingpt(f"{COPY} run {target}")
    assert read_metrics("run") == read_metrics("fork") == read_metrics(target)
    assert newest_number("fork") == newest_number(target) == 2
    assert files(Path("fork/metrics")) == ["attempt-00001.jsonl", "attempt-00002.jsonl"]
    # What is there stays.
    Path("fork/metrics/attempt-00002.jsonl").write_text("")
    mingpt(f"{COPY} run fork")
    assert Path("fork/metrics/attempt-00002.jsonl").read_text() == ""


# --- other runs ---


def of_run(name: str, *ats: str) -> dict[str, Any]:
    """What the manifests of a run say whose attempts began at these times."""
    history = [{"attempt": number, "at": at} for number, at in enumerate(ats, 1)]
    return {**PROVENANCE, "run": name, "history": history}


@pytest.mark.parametrize("provenance", [of_run("theirs", "09:00"), of_run("mine", "10:00") | {"config": {"seed": 2}}])
def test_a_place_with_snapshots_of_another_run_is_refused(provenance: dict[str, Any], target: str) -> None:
    save(store(), 31, provenance=of_run("mine", "10:00"))
    save(store(target), 2, provenance=provenance)
    Path("run/metrics").mkdir()
    Path("run/metrics/attempt-00001.jsonl").write_text("{}\n")
    assert f"{target}/snapshots: step 2" in mingpt.refused(f"{COPY} run {target}")
    assert store(target).folders() == [2]
    assert not Store(f"{target}/metrics").files(None)


def test_a_fork_that_has_gone_on_takes_no_more_steps_and_says_no_to_none_that_it_has(target: str) -> None:
    for step in (2, 4):
        save(store("mine"), step, provenance=of_run("mine", "10:00"))
    mingpt(f"{COPY} mine {target} --step=2")
    save(store(target), 3, provenance=of_run("fork", "10:00", "11:00"))
    mingpt(f"{COPY} mine {target} --step=2")  # a script that copies and trains is started again
    mingpt.refused(f"{COPY} mine {target}")
    assert store(target).folders() == [3, 2]


def test_a_run_that_has_gone_on_and_deleted_what_was_copied_is_copied_again(target: str) -> None:
    save(store("mine"), 2, provenance=of_run("mine", "10:00"))
    mingpt(f"{COPY} mine {target}")
    save(store("mine"), 4, provenance=of_run("mine", "10:00", "11:00"))
    store("mine").delete(2)
    mingpt(f"{COPY} mine {target}")
    mingpt(f"{COPY} {target} mine")  # and back
    assert store(target).folders() == store("mine").folders() == [4, 2]


def test_a_run_that_has_lost_its_snapshots_gets_them_back(target: str) -> None:
    """Its own attempts are there, which began from nothing, and the copy has none."""
    Attempt.claim(target, 0, None)
    mingpt(f"{COPY} run {target}")
    assert store(target).steps() == STEPS
