"""A rewind can be undone: what it has set aside is committed again, by a claim that readers follow."""

import os
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from mingpt.errors import UserError
from mingpt.history.history import read_metrics
from mingpt.observe.ledger import kept_until
from mingpt.report.reading import Run
from mingpt.snapshot.attempts import Attempt, records
from mingpt.snapshot.format import MANIFEST
from mingpt.snapshot.lineage import overtaken
from mingpt.snapshot.reader import read_manifest, verify
from mingpt.snapshot.retention import Retention, plan
from mingpt.snapshot.store import Store
from mingpt.tiers.rewinding import rewind, undo
from tests.kits.report_kit import Made
from tests.kits.snapshot_kit import PROVENANCE, save, state_of
from tests.kits.verb_kit import mingpt


class History:
    """A run whose attempts claim and commit as real ones do, without the training. The first has left steps 10 to 30"""

    def __init__(self, folder: str) -> None:
        self.dir = folder
        self.store = Store(f"{folder}/snapshots")
        self.said: list[str] = []
        self.attempt(0, 10, 20, 30)
        self.first = self.digests()

    def attempt(self, start: int, *steps: int, shift: int = 0) -> None:
        """Continue from `start`, and commit these steps; `shift` makes their bits others."""
        parent = read_manifest(self.store, start) if start else None
        claim = Attempt.claim(self.dir, start, parent.digest if parent else None, parent.attempt if parent else 0)
        history = [{"attempt": claim.number, "from_step": start}]
        for step in steps:
            save(self.store, step, state_of(step + shift), provenance=PROVENANCE | {"history": history})

    def rewind(self, step: int) -> None:
        rewind(self.dir, self.store, step, "/nowhere", self.said.append)

    def undo(self) -> None:
        undo(self.dir, self.store, "/nowhere", self.said.append)

    def digests(self) -> dict[int, str]:
        assert overtaken(self.store, records(self.dir)) == []  # the next start takes what there is
        return {step: verify(self.store, step).digest for step in self.store.steps()}


@pytest.fixture
def run(tmp_path: Path) -> History:
    return History(str(tmp_path / "run"))


def test_two_rewinds_are_undone_one_after_the_other(run: History) -> None:
    """What was computed after a rewind is set aside in turn."""
    run.rewind(20)
    assert [*run.digests()] == [20, 10]
    run.attempt(20, 30, 40, shift=100)
    second = run.digests()
    run.rewind(10)
    run.undo()
    assert run.digests() == second
    run.undo()
    assert run.digests() == run.first
    assert run.first[30] in run.said[-1]
    assert [f.was_rewound for f in run.store.files(40)].count(True) == 1  # nothing is deleted
    run.attempt(30, 50)
    assert [*run.digests()] == [50, 30, 20, 10]


def test_a_rewind_to_where_the_run_is_already_keeps_no_other_from_being_undone(run: History) -> None:
    for step in (20, 20, 20, 10):
        run.rewind(step)
    run.undo()
    assert [*run.digests()] == [20, 10]
    assert Run(run.dir).last_step == 20
    run.undo()
    assert run.digests() == run.first
    with pytest.raises(UserError, match="no rewind"):
        run.undo()


@pytest.mark.parametrize(("scheme", "deletions"), [("", 0), ("memory:/", 0), ("memory:/", 1)])
def test_an_interrupted_undo_is_finished_by_the_same_command(
    scheme: str, deletions: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk renames what comes back; an object store copies, then deletes. It is killed before, or after one."""
    run = History(f"{scheme}{tmp_path}")
    run.rewind(10)
    owner: Any = run.store.fs if scheme else os
    name = "rm_file" if scheme else "rename"
    plain, done = getattr(owner, name), list[object]()

    def act(*paths: object) -> None:
        if len(done) == deletions:
            raise KeyboardInterrupt
        done.append(paths)
        plain(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, act)
        with pytest.raises(KeyboardInterrupt):
            run.undo()
    assert not scheme or run.store.steps()[0] == 30  # an attempt that starts now loses nothing
    run.undo()
    assert run.digests() == run.first
    assert not [file for step in run.first for file in run.store.files(step) if file.is_set_aside]


def test_what_an_attempt_found_in_memory_and_made_durable_is_brought_back(run: History) -> None:
    """Its snapshot is of the step at which it began."""
    claim = Attempt.claim(run.dir, 40, "d", parent=1)
    history = [{"attempt": claim.number, "from_step": 40}]
    save(run.store, 40, state_of(40), provenance=PROVENANCE | {"history": history})
    run.rewind(10)
    run.undo()
    assert [*run.digests()] == [40, 30, 20, 10]


def test_a_damaged_snapshot_of_the_line_costs_none_of_those_before_it(run: History) -> None:
    """Steps older than an undone rewind are on the line again, and not overtaken by it."""
    run.rewind(10)
    run.undo()
    Path(run.store.folder(30), MANIFEST).write_bytes(b"{}")
    run.store.set_aside(30)
    assert [*run.digests()] == [20, 10]


def test_where_the_runs_memory_is_not_known_nothing_changes(run: History) -> None:
    run.rewind(20)
    Path(run.dir, "run-id").symlink_to("nowhere")
    before = sorted(Path(run.dir).rglob("*"))
    for go in (lambda: run.rewind(10), run.undo):
        with pytest.raises(UserError, match="run-id is a link"):
            go()
    assert sorted(Path(run.dir).rglob("*")) == before


def test_what_retention_has_left_is_brought_back_and_without_any_nothing_changes(run: History) -> None:
    run.rewind(10)
    next(Path(run.store.folder(30)).glob("model-*")).unlink()
    run.undo()
    assert [*run.digests()] == [20, 10]
    assert any(line.startswith("step 30: ") and "model-" in line for line in run.said)
    run.rewind(10)
    shutil.rmtree(run.store.folder(20))
    claims = records(run.dir)
    with pytest.raises(UserError, match="step 10"):
        run.undo()
    assert records(run.dir) == claims


def test_retention_deletes_nothing_that_a_rewind_has_set_aside(run: History) -> None:
    run.rewind(10)
    run.attempt(10, 20, 40, 50, shift=100)  # it has a step 20 of its own
    plan(run.store, Retention(1, keep_best=False, orphan_age=1e-6), 50, {}).apply(run.store)  # all is older than that
    assert run.store.steps() == [50]
    run.undo()
    assert run.digests() == {step: run.first[step] for step in (20, 30)}


@pytest.mark.parametrize("bucket", [False, True])
def test_prune_deletes_what_a_rewind_has_set_aside_and_no_part_of_another_snapshot(
    tmp_path: Path, bucket: bool
) -> None:
    """Also where the run has computed a step again: with the same bits (20), and with others (30)."""
    run = History(f"memory://{uuid4().hex}" if bucket else str(tmp_path))
    run.attempt(30, 40)
    run.rewind(10)
    run.attempt(10, 20)
    run.attempt(20, 30, 50, shift=100)
    kept = run.digests()
    would = mingpt(f"snapshots prune {run.dir} --keep 9 --dry-run")
    assert run.digests() == kept
    assert mingpt(f"snapshots prune {run.dir} --keep 9") == would.replace("would delete", "deleted").replace(
        "would stay", "left"
    )
    assert [line for line in would.splitlines() if "rewind" in line] == [
        f"would delete what a rewind has set aside of step {step}" for step in (40, 30, 20)
    ]
    assert run.digests() == kept == {step: kept[step] for step in (50, 30, 20, 10)}
    assert run.store.folders() == [50, 30, 20, 10]
    for step in run.store.folders():
        names = {MANIFEST, *read_manifest(run.store, step).parts}
        assert {file.name for file in run.store.files(step)} == names
    with pytest.raises(UserError, match="can't be undone"):
        run.undo()


def test_prune_leaves_the_parts_that_an_attempt_is_writing_again(run: History) -> None:
    """Before it commits them: its bits are those that were set aside."""
    run.rewind(10)
    again = {path: path.stat().st_mtime + 1 for path in Path(run.store.folder(20)).glob("model-*")}
    for path, now in again.items():
        os.utime(path, (now, now))
    plan(run.store, Retention(9), 10, {}, undoable=False).apply(run.store)
    assert {*Path(run.store.folder(20)).iterdir()} == {*again}
    assert not Path(run.store.folder(30)).exists()


def test_prune_leaves_what_an_undo_brings_back_meanwhile(run: History) -> None:
    run.rewind(10)
    planned = plan(run.store, Retention(9), 10, {}, undoable=False)
    run.undo()
    planned.apply(run.store)
    assert run.digests() == run.first


def test_metrics_and_ledger_follow_the_undoing(tmp_path: Path) -> None:
    made = Made(tmp_path).attempt(1, 0, 30)
    made.claim(2, 10, 1, by="rewind").attempt(3, 10, 15, parent=1)
    made.claim(4, 30, 1, by="rewind")
    path = tmp_path / "attempts/00004.json"
    path.write_text(path.read_text().replace("}", ', "undoes": 2}'))
    assert [r["attempt"] for r in read_metrics(str(tmp_path))] == [1] * 30
    assert kept_until(records(str(tmp_path)), {1: 30, 3: 15}) == {1: 30, 3: 10}
