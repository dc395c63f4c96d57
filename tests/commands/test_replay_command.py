"""`mingpt replay`: what it prints, writes and refuses."""

import json
import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest

from mingpt.commands import generate, replay
from mingpt.observe.trace import RECORD
from mingpt.report.reading import read_run
from mingpt.snapshot.reader import verify
from mingpt.snapshot.store import Store
from replay_kit import data_of, files_of, train_here
from told import Told

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, str]]:
    """A run of two attempts, and where its data is."""
    folder = tmp_path_factory.mktemp("made")
    how, (where,) = data_of("text", folder / "data")
    here = where, f"data.cache_dir={folder}/cache"
    for last in (5, 9):
        train_here(f"{folder}/run", *how, *here, f"train.max_steps={last}")
    return folder / "run", here


@pytest.fixture
def run(made: tuple[Path, tuple[str, str]]) -> Path:
    """Not to be changed."""
    return made[0]


@pytest.fixture
def here(made: tuple[Path, tuple[str, str]]) -> tuple[str, str]:
    return made[1]


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(run, tmp_path / "run")


def shown(capsys: Captured, *arguments: object) -> Any:
    assert replay.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_without_samples_with_another_setting_and_what_follows(
    run: Path, here: tuple[str, str], capsys: Captured
) -> None:
    change = ("--drop", "0,3", "--set", "optimizer.lr=0.05", "--set", "optimizer.clip_norm=0.1", "--then", "3")
    found = shown(capsys, run, "--step", "6", *here, *change)
    was, now = found["as_it_was"], found["changed"]
    assert (was["targets"], now["targets"]) == (128, 96)
    assert was["clip_factor"] == pytest.approx(1 / was["grad_norm"], rel=1e-4)
    assert now["clip_factor"] == pytest.approx(0.1 / now["grad_norm"], rel=1e-4)
    assert now["lr"] == pytest.approx(5 * was["lr"])
    assert [loss is None for loss in now["losses"]] == [True, False, False, True] + [False] * 4
    rest = [loss for i, loss in enumerate(was["losses"]) if i not in (0, 3)]
    assert now["loss"] == pytest.approx(sum(rest) / 6, rel=1e-5)
    assert [(row["step"], row["same"]) for row in found["then"]] == [(7, False), (8, False), (9, False)]


def test_what_followed_is_the_same_if_nothing_is_changed(run: Path, here: tuple[str, str], capsys: Captured) -> None:
    found = shown(capsys, run, "--step", "3", *here, "--then", "6")
    assert [(row["attempt"], row["same"]) for row in found["steps"] + found["then"]] == [(1, True)] * 5 + [
        (2, True)
    ] * 4


def test_another_bit_is_named(copy: Path, here: tuple[str, str], tmp_path: Path, capsys: Captured) -> None:
    (path,) = copy.glob("trace/attempt-00002-*.bin")
    records = np.fromfile(path, RECORD)
    records["norm"][1] = np.nextafter(records["norm"][1], 9.0)  # of step 7
    records.tofile(path)
    assert replay.main([str(copy), "--step", "8", *here]) == 1
    assert capsys.readouterr().out.startswith("OTHER BITS: step 7 differs first from what attempt 2 recorded: loss ")
    assert replay.main([f"{copy}@7", "--out", f"{tmp_path}/out", *here]) == 1
    assert "step 7" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    shutil.rmtree(copy / "trace")
    assert replay.main([str(copy), "--step", "8", *here]) == 0
    assert capsys.readouterr().out.startswith("nothing to compare with: ")


@pytest.mark.parametrize(
    "options",
    [
        "--drop a", "--drop 8", "--drop 0,1,2,3,4,5,6,7", "--set optimizer.lrr=1", "--set optimizer.lr=-1",
        "--set run.name=x", "--set data.stride=2", "--set model.n_embd=48", "--attempt 7", "--step 0", "--step -1",
        "--step 10", "--out {new}", "{run}@3 --out {run}", "{run}@3 --out=", "{run}@3 --out=/",
        "{run}@3 --out {run}/snapshots", "{run}@3 --out {run}/snapshots/step-000000008", "{run}@2 --out {old}",
    ],
)  # fmt: skip
def test_mistakes(run: Path, here: tuple[str, str], tmp_path: Path, capsys: Captured, told: Told, options: str) -> None:
    """old: a place that has the step already."""
    before, old = files_of(run), tmp_path / "old"
    if "{old}" in options:
        assert replay.main([f"{run}@2", "--out", str(old), *here]) == 0
    words = options.format(run=run, new=tmp_path / "new", old=old).split()
    if words[0].startswith("--"):
        words = [str(run), *(() if "--out" in words else ("--step", "6")), *words]
    capsys.readouterr()
    assert replay.main([*words, *here]) == 64
    told(capsys.readouterr().err, run, tmp_path)
    assert files_of(run) == before


def test_out_gives_the_digest_of_a_run_that_stored_it(run: Path, here: tuple[str, str], tmp_path: Path) -> None:
    """And what was written generates, and trains on to the run's own end."""
    train_here(f"{tmp_path}/all", *here, "train.max_steps=9", "snapshot.every_steps=1")
    for step in (2, 7, 8):  # the last one was stored
        assert replay.main([f"{run}@{step}", "--out", f"{tmp_path}/out", *here]) == 0
    ours, theirs = Store(f"{tmp_path}/out/snapshots"), Store(f"{tmp_path}/all/snapshots")
    assert ours.steps() == [8, 7, 2]
    assert {n: k for n, k in read_run(f"{tmp_path}/out").kept.items() if k} == {2: 8}  # without a trace
    for step in ours.steps():
        assert verify(ours, step).digest == verify(theirs, step).digest
    assert verify(ours, 7).metrics.loss == verify(theirs, 7).metrics.loss
    assert generate.main([f"{tmp_path}/out", "--step", "7", "--tokens", "5"]) == 0
    shutil.rmtree(ours.folder(8))
    train_here(f"{tmp_path}/out", *here, "train.max_steps=9")
    assert verify(ours, 9).digest == verify(theirs, 9).digest


def test_out_computes_a_stored_step_whose_snapshot_is_damaged(
    run: Path, copy: Path, here: tuple[str, str], capsys: Captured
) -> None:
    part = next((copy / "snapshots/step-000000008").glob("optimizer*"))
    part.write_bytes(part.read_bytes()[:-1])
    bucket = f"memory://{uuid4().hex}/out"
    assert replay.main([f"{copy}@8", "--out", bucket, *here]) == 0
    assert "the snapshot of step 8 can't be used (" in capsys.readouterr().out
    assert verify(Store(f"{bucket}/snapshots"), 8).digest == verify(Store(f"{run}/snapshots"), 8).digest


def test_a_change_is_not_taken_for_another_machine(run: Path, here: tuple[str, str], capsys: Captured) -> None:
    assert replay.main([str(run), "--step", "9", *here, "--set", "optimizer.name=muon"]) == 0
    assert capsys.readouterr().err == ""


def test_a_run_of_which_only_a_rewind_is_left(tmp_path: Path) -> None:
    claim = {"id": "a", "from_step": 5, "from_digest": None, "parent": 0, "by": "rewind"}
    (tmp_path / "attempts").mkdir()
    (tmp_path / "attempts/00001.json").write_text(json.dumps(claim))
    assert replay.main([str(tmp_path), "--step", "3"]) == 64
