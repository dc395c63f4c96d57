"""`mingpt replay`: what it prints, writes and refuses."""

import json
import re
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
from run_kit import Run

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A run of two attempts, and where its data is."""
    folder = tmp_path_factory.mktemp("made")
    how, (where,) = data_of("text", folder / "data")
    for last in (5, 9):
        train_here(f"{folder}/run", *how, where, f"data.cache_dir={folder}/cache", f"train.max_steps={last}")
    return f"{folder}/run", where


def test_first_the_bits_then_the_step(made: tuple[str, str], capsys: Captured) -> None:
    url, where = made
    before = files_of(Path(url))
    assert replay.main([url, "--step", "7", where, "--samples", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "steps 6 to 7: same loss and norm bits as recorded by attempt 2"
    assert lines[1] == f"step 7 of {url}, computed from step 5's snapshot"
    shown = "\n".join(lines)
    assert re.search(r"^loss \d\.\d{6} over 128 targets, gradient norm .*, learning rate 0\.0", lines[2])
    assert re.search(r"^transformer\.h\.1 +[\d.]+ +[\d.]+ +[\d.e-]+ +[\d.]+$", shown, re.M)
    assert re.search(r"^worst samples:\n +\d\.\d{4}  at \d \(sample [\d,]+\) +\S+.*\n\nbest samples:\n", shown, re.M)
    assert files_of(Path(url)) == before


def test_without_samples_with_another_setting_and_what_follows(made: tuple[str, str], capsys: Captured) -> None:
    url, where = made
    change = ("--drop", "0,3", "--set", "optimizer.lr=0.05", "--set", "optimizer.clip_norm=0.1", "--then", "3")
    assert replay.main([url, "--step", "6", where, *change, "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    was, now = shown["as_it_was"], shown["changed"]
    assert (was["targets"], now["targets"]) == (128, 96)
    assert was["clip_factor"] == pytest.approx(1 / was["grad_norm"], rel=1e-4)
    assert now["clip_factor"] == pytest.approx(0.1 / now["grad_norm"], rel=1e-4)
    assert now["lr"] == pytest.approx(5 * was["lr"])
    assert [loss is None for loss in now["losses"]] == [True, False, False, True] + [False] * 4
    rest = [loss for i, loss in enumerate(was["losses"]) if i not in (0, 3)]
    assert now["loss"] == pytest.approx(sum(rest) / 6, rel=1e-5)
    assert [(row["step"], row["same"]) for row in shown["then"]] == [(7, False), (8, False), (9, False)]
    assert (
        shown["change_text"]
        == "without the samples at 0, 3; optimizer.lr=0.05 from step 6 on; optimizer.clip_norm=0.1 from step 6 on"
    )


def test_what_followed_is_the_same_if_nothing_is_changed(made: tuple[str, str], capsys: Captured) -> None:
    assert replay.main([made[0], "--step", "3", made[1], "--then", "6", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["same"] for row in shown["steps"] + shown["then"]] == [True] * 9
    assert {row["attempt"] for row in shown["then"]} == {1, 2}


def test_another_bit_is_named(made: tuple[str, str], tmp_path: Path, capsys: Captured) -> None:
    url = shutil.copytree(made[0], tmp_path / "run")
    (path,) = url.glob("trace/attempt-00002-*.bin")
    records = np.fromfile(path, RECORD)
    records["norm"][1] = np.nextafter(records["norm"][1], 9.0)  # of step 7
    records.tofile(path)
    assert replay.main([str(url), "--step", "8", made[1]]) == 1
    assert capsys.readouterr().out.startswith("OTHER BITS: step 7 differs first from what attempt 2 recorded: loss ")
    assert replay.main([f"{url}@7", "--out", f"{tmp_path}/out", made[1]]) == 1
    assert re.search(r"step 7 has other bits than attempt 2 recorded: .*: nothing was written", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
    shutil.rmtree(url / "trace")
    assert replay.main([str(url), "--step", "8", made[1]]) == 0
    assert capsys.readouterr().out.startswith("nothing to compare with: the run recorded no bits of these steps\n")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--drop", "a"), "--drop a: give positions in the batch, counted from 0: --drop 17,93"),
        (("--drop", "8"), "--drop 8: the step has the positions 0 to 7"),
        (("--drop", "0,1,2,3,4,5,6,7"), "--drop: no sample would be left: leave one in"),
        (("--set", "optimizer.lrr=1"), "optimizer.lrr is not a key (did you mean optimizer.lr?)"),
        (("--set", "optimizer.lr=-1"), "optimizer.lr=-1: Input must be greater than 0"),
        (("--set", "run.name=x"), "--set run.name: this key does not affect the result: leave it out"),
        (("--set", "data.stride=2"), "--set data.stride: the samples of a step are those of the run"),
        (("--set", "model.n_embd=48"), "the state of step 5 is one of another model"),
        (("--attempt", "7"), "--attempt 7: "),
        (("--step", "10"), "step 10: "),
    ],
)
def test_mistakes(made: tuple[str, str], capsys: Captured, options: tuple[str, ...], problem: str) -> None:
    assert replay.main([made[0], "--step", "6", made[1], *options]) == 64
    assert problem.replace("Input must", "must") in capsys.readouterr().err.replace("Input must", "must")


def test_out_gives_the_digest_of_a_run_that_stored_it(made: tuple[str, str], tmp_path: Path) -> None:
    """And what was written generates, and trains on to the run's own end."""
    url, where = made
    cache = f"data.cache_dir={tmp_path}/cache"
    train_here(f"{tmp_path}/all", where, cache, "train.max_steps=9", "snapshot.every_steps=1")
    before = files_of(Path(url))
    for step in (2, 7, 8):  # the last one was stored
        assert replay.main([f"{url}@{step}", "--out", f"{tmp_path}/out", where]) == 0
    assert files_of(Path(url)) == before
    ours, theirs = Store(f"{tmp_path}/out/snapshots"), Store(f"{tmp_path}/all/snapshots")
    assert ours.steps() == [8, 7, 2]
    assert {n: k for n, k in read_run(f"{tmp_path}/out").kept.items() if k} == {2: 8}  # without a trace
    for step in ours.steps():
        assert verify(ours, step).digest == verify(theirs, step).digest
    assert verify(ours, 7).metrics.loss == verify(theirs, 7).metrics.loss
    assert generate.main([f"{tmp_path}/out", "--step", "7", "--tokens", "5"]) == 0
    shutil.rmtree(ours.folder(8))
    train_here(f"{tmp_path}/out", where, cache, "train.max_steps=9")
    assert verify(ours, 9).digest == verify(theirs, 9).digest


def test_out_replaces_nothing(made: tuple[str, str], tmp_path: Path, capsys: Captured) -> None:
    url, where = made
    bucket = f"memory://{uuid4().hex}/out"
    assert replay.main([f"{url}@3", "--out", bucket, where]) == 0
    for point, out, problem in (
        (f"{url}@3", bucket, "step 3 is there already"),
        (f"{url}@3", url, "the run itself stays as it is"),
        (url, bucket, "write RUN@N"),
    ):
        capsys.readouterr()
        assert replay.main([point, "--out", out, where]) == 64
        assert problem in capsys.readouterr().err


@pytest.mark.parametrize("out", ["", "/", "{run}/snapshots", "{run}/snapshots/step-000000008"])
def test_out_writes_neither_into_the_run_nor_at_the_root(made: tuple[str, str], capsys: Captured, out: str) -> None:
    url, where = made
    before = files_of(Path(url))
    assert replay.main([f"{url}@3", "--out", out.format(run=url), where]) == 64
    assert "--out=" in capsys.readouterr().err
    assert files_of(Path(url)) == before


def test_out_computes_a_stored_step_whose_snapshot_is_damaged(
    made: tuple[str, str], tmp_path: Path, capsys: Captured
) -> None:
    url, where = made
    run = shutil.copytree(url, tmp_path / "run")
    digest = verify(Store(f"{url}/snapshots"), 8).digest
    part = next((run / "snapshots/step-000000008").glob("optimizer*"))
    part.write_bytes(part.read_bytes()[:-1])
    assert replay.main([f"{run}@8", "--out", f"{tmp_path}/out", where, f"data.cache_dir={tmp_path}/cache"]) == 0
    assert "the snapshot of step 8 can't be used (" in capsys.readouterr().out
    assert verify(Store(f"{tmp_path}/out/snapshots"), 8).digest == digest


def test_a_change_is_not_taken_for_another_machine(made: tuple[str, str], capsys: Captured) -> None:
    url, where = made
    assert replay.main([url, "--step", "9", where, "--set", "optimizer.name=muon"]) == 0
    assert "this machine is not as" not in capsys.readouterr().err


def test_a_run_of_which_only_a_rewind_is_left(tmp_path: Path, capsys: Captured) -> None:
    claim = {"id": "a", "from_step": 5, "from_digest": None, "parent": 0, "by": "rewind"}
    (tmp_path / "attempts").mkdir()
    (tmp_path / "attempts/00001.json").write_text(json.dumps(claim))
    assert replay.main([str(tmp_path), "--step", "3"]) == 64
    assert "nothing tells of an attempt that has trained there" in capsys.readouterr().err


@pytest.mark.parametrize(("step", "cure"), [(0, "a later"), (-1, "a later"), (99, "an earlier")])
def test_no_such_step(made: tuple[str, str], capsys: Captured, step: int, cure: str) -> None:
    url, where = made
    assert replay.main([url, "--step", str(step), where]) == 64
    assert f"has the steps 1 to 9: give {cure} one" in capsys.readouterr().err


@pytest.mark.slow
def test_attempts_of_other_worlds(tmp_path: Path, text: Path, cache: Path, capsys: Captured) -> None:
    """Three attempts with 1, 3 and 2 processes; in one process every step, and the state of one."""
    run = Run(f"{tmp_path}/run", text, cache)
    for world, last in ((1, 6), (3, 11), (2, 14)):
        run.finish(world, f"train.max_steps={last}")
    here = (f"data.path={text}", f"data.cache_dir={cache}")
    assert replay.main([run.dir, "--step", "1", *here, "--then", "13", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(r["attempt"], r["same"]) for r in shown["steps"] + shown["then"]] == (
        [(1, True)] * 6 + [(2, True)] * 5 + [(3, True)] * 3
    )
    alone = Run(f"{tmp_path}/alone", text, cache, ("snapshot.every_steps=1",))
    alone.finish(1, "train.max_steps=10")
    assert replay.main([f"{run.dir}@10", "--out", f"{tmp_path}/out", *here]) == 0
    assert verify(Store(f"{tmp_path}/out/snapshots"), 10).digest == alone.digest()
