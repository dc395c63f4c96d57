"""`mingpt snapshots copy` mixes no two runs, and goes on copying one."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from mingpt.commands import snapshots
from mingpt.snapshot.attempts import Attempt
from mingpt.snapshot.store import Store
from snapshot_kit import PROVENANCE, save

Captured = pytest.CaptureFixture[str]


def of_run(name: str, *ats: str) -> dict[str, Any]:
    """What the manifests of a run say whose attempts began at these times."""
    history = [{"attempt": number, "at": at} for number, at in enumerate(ats, 1)]
    return {**PROVENANCE, "run": name, "history": history}


@pytest.fixture(params=["local", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{tmp_path}/other" if request.param == "local" else f"memory://{uuid4().hex}/other"


def test_a_place_with_snapshots_of_another_run_is_refused(tmp_path: Path, target: str, capsys: Captured) -> None:
    save(Store(f"{tmp_path}/mine/snapshots"), 4, provenance=of_run("mine", "10:00"))
    theirs = Store(f"{target}/snapshots")
    save(theirs, 2, provenance=of_run("theirs", "09:00"))
    (tmp_path / "mine/metrics").mkdir()
    (tmp_path / "mine/metrics/attempt-00001.jsonl").write_text("{}\n")
    capsys.readouterr()
    assert snapshots.main(["copy", f"{tmp_path}/mine", target]) == 64
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        f"error: {target}/snapshots: step 2 is there, of another run (theirs, not mine): nothing was copied; give "
        f"another TO\n",
    )
    assert theirs.folders() == [2]
    assert not Store(f"{target}/metrics").files(None)


def test_a_fork_that_has_gone_on_takes_no_more_steps_and_says_no_to_none_that_it_has(
    tmp_path: Path, target: str, capsys: Captured
) -> None:
    run, fork = Store(f"{tmp_path}/mine/snapshots"), Store(f"{target}/snapshots")
    for step in (2, 4):
        save(run, step, provenance=of_run("mine", "10:00"))
    copy = ["copy", f"{tmp_path}/mine", target]
    assert snapshots.main([*copy, "--step", "2"]) == 0
    save(fork, 3, provenance=of_run("fork", "10:00", "11:00"))
    assert snapshots.main([*copy, "--step", "2"]) == 0  # a script that copies and trains is started again
    assert snapshots.main(copy) == 64
    assert "step 3 is there, of another run (fork, not mine)" in capsys.readouterr().err
    assert fork.folders() == [3, 2]


def test_two_runs_that_began_in_one_second_differ_in_their_settings(tmp_path: Path, target: str) -> None:
    save(Store(f"{tmp_path}/mine/snapshots"), 4, provenance={**PROVENANCE, "config": {"seed": 2}})
    save(Store(f"{target}/snapshots"), 2)
    assert snapshots.main(["copy", f"{tmp_path}/mine", target]) == 64


def test_a_run_that_has_gone_on_and_deleted_what_was_copied_is_copied_again(tmp_path: Path, target: str) -> None:
    run, copy = Store(f"{tmp_path}/mine/snapshots"), ["copy", f"{tmp_path}/mine", target]
    save(run, 2, provenance=of_run("mine", "10:00"))
    assert snapshots.main(copy) == 0
    save(run, 4, provenance=of_run("mine", "10:00", "11:00"))
    run.delete(2)
    assert snapshots.main(copy) == 0
    assert Store(f"{target}/snapshots").folders() == [4, 2]
    assert snapshots.main(["copy", target, f"{tmp_path}/mine"]) == 0  # and back
    assert run.folders() == [4, 2]


def test_a_run_that_has_lost_its_snapshots_gets_them_back(tmp_path: Path, target: str) -> None:
    """Its own attempts are there, which began from nothing, and the copy has none."""
    save(Store(f"{tmp_path}/backup/snapshots"), 4)
    Attempt.claim(target, 0, None)
    assert snapshots.main(["copy", f"{tmp_path}/backup", target]) == 0
    assert Store(f"{target}/snapshots").steps() == [4]


def test_a_folder_of_runs_is_told_from_one_without(tmp_path: Path, capsys: Captured) -> None:
    save(Store(f"{tmp_path}/runs/a/snapshots"), 1)
    assert snapshots.main(["verify", f"{tmp_path}/runs"]) == 64
    assert f"`mingpt snapshots list {tmp_path}/runs` shows the runs in there" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert snapshots.main(["verify", f"{tmp_path}/empty"]) == 64
    assert "shows the runs" not in capsys.readouterr().err
