"""Sweeps: which trials there are, what can be none, and what is known of them."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mingpt import cli
from mingpt.commands import sweep
from mingpt.errors import UserError
from mingpt.sweep import local, record
from mingpt.sweep.expand import expand, name_of, validate
from mingpt.sweep.record import Entry, read_record, rows, table, write_record
from told import Told


def names(*overrides: str, zipped: bool = False) -> list[str]:
    return [trial.name for trial in expand([], overrides, "runs/s", zipped)]


def test_all_combinations_in_the_order_of_their_values() -> None:
    assert names("optimizer.lr=1e-3,3e-3", "seed=range(1,3)", "train.max_steps=5") == [
        f"optimizer.lr-{lr}_seed-{seed}" for lr in ("0.001", "0.003") for seed in (1, 2)
    ]
    trial = expand([], ["seed=choice(1,2)", "train.max_steps=5"], "runs/s")[1]
    assert trial.arguments == ["train.max_steps=5", "seed=2", "run.name=seed-2", "run.dir=runs/s/seed-2"]


def test_zip_makes_pairs_and_glob_takes_options() -> None:
    assert names("seed=1,1,2", "train.max_steps=5,6,5", zipped=True) == [  # a value may be in several pairs
        "seed-1_train.max_steps-5",
        "seed-1_train.max_steps-6",
        "seed-2_train.max_steps-5",
    ]
    assert names("schedule=glob(c*)") == ["schedule-constant", "schedule-cosine"]
    assert names("seed=1") == ["only"]


@pytest.mark.parametrize(
    "arguments",
    [
        "--zip seed=1,2 batch.micro_size=1,2,4",
        "optimizer.lr=interval(1e-4,1e-2)",
        "seed=shuffle(1,2)",
        "seed=1,2 seed=3,4",
        "++seed=3 seed=1,2",
        "run.dir=a,b",
        "seed=range(1,500) train.max_steps=5,6,7",
        "seed=range(1,1000000000000)",
        "--zip seed=range(1,5000) batch.micro_size=range(1,5000)",
        "seed=range(5,1)",
        "schedule=glob(x*)",
        "optimizer.lr=glob(*)",
        "seed",
        # Every problem of every trial, and those of files, before one starts.
        "optimizer.lr=-1,1e-3 batch.micro_siz=2 seed=1",
        "data=char data.path=no.txt,none.txt batch.global_size=8 batch.micro_size=8",
        # Options.
        "seed=1,2 --on=slurm --launcher-args='",
        "seed=1,2 --nproc-per-node=two",
        "seed=1,2 --nproc-per-node=0",
        "seed=1,2 --dir=",
        "seed=1,2 --dir= --on=sky",
        # Searches.
        "seed=1,2 --optimize=val_loss",
        "seed=1,2 --trials=3",
        "seed=1 --optimize=val_loss --trials=3",
        "seed=interval(2,1) --optimize=val_loss --trials=3",
        "optimizer.lr=tag(log,interval(0,1)) --optimize=val_loss --trials=3",
        "seed=tag(log,choice(1,2)) --optimize=val_loss --trials=3",
        "seed=1,2 --optimize=val_loss --trials=3 --zip",
        "seed=1,2 --optimize=val_loss --trials=3 --on=slurm",
        "seed=1,2 --prune=median --on=slurm",
        "optimizer.lr=interval(-2,-1) --optimize=val_loss --trials=3",
        "experiment=synthetic seed=1,2 --prune=median train.max_steps=3 train.eval_every=3",
    ],
)
def test_what_makes_no_trials_is_refused(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], told: Told
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sweep.main(arguments.split()) == 64
    out, err = capfd.readouterr()
    assert (out, [*tmp_path.iterdir()]) == ("", [])
    told(err)


@pytest.mark.parametrize("option", ["-m", "--multirun"])
def test_hydras_word_for_it(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[tuple[str, list[str]]]()
    run = SimpleNamespace(main=lambda: started.append(("sweep", sys.argv[1:])))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setitem(sys.modules, "mingpt.sweep.__main__", run)
    assert cli.run("train", ["seed=1,2", option]) == 0
    assert started == [("sweep", ["seed=1,2"])]


@pytest.mark.parametrize("option", ["--dir=http://user:S3CRET@h/x", "--name=http://user:S3CRET@h"])
def test_a_password_in_a_wrong_place_is_not_shown(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep.main([option, "seed=1,2"]) == 64
    assert "S3CRET" not in capsys.readouterr().err


def test_a_name_is_safe_and_those_that_lose_characters_stay_apart() -> None:
    strange = [name_of([f"data.path='{path}'"]) for path in ("/a b", "/a/b", "../../x", "é" * 300)]
    assert len(set(strange)) == 4
    assert all(name.isascii() and len(name) <= 100 and not set(name) & set("/ '=$") for name in strange)


def test_threads_do_not_follow_from_the_number_of_trials() -> None:
    trials = expand([], ["train.threads=1,3"], "runs/s")
    configs = validate(trials)
    assert [local.environment(configs[t.name])["OMP_NUM_THREADS"] for t in trials] == ["1", "3"]


def test_a_folder_that_is_no_sweep_and_one_that_is_damaged(tmp_path: Path) -> None:
    assert read_record(str(tmp_path)) is None
    write_record(str(tmp_path), {"a": Entry({"seed": "1"}, ["seed=1"], 5, str(tmp_path / "a/snapshots"))})
    assert list(read_record(str(tmp_path)) or {}) == ["a"]
    good = {"values": {}, "overrides": [], "max_steps": 5, "snapshots": "x"}
    for bad in (3, good | {"max_steps": "x"}, good | {"values": ["x"]}, good | {"snapshots": 1}, {"more": 1}):
        (tmp_path / "sweep.json").write_text(json.dumps({"a": bad}))
        with pytest.raises(UserError, match=r"sweep\.json"):
            read_record(str(tmp_path))


@pytest.mark.parametrize(
    "place", ["http://127.0.0.1:9/iam", "/root", "{}/../x", "{}/a::http://127.0.0.1:9/", "s3://b/x"]
)
def test_a_strangers_record_chooses_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    write_record(str(tmp_path), {"a": Entry({}, [], 5, place.format(tmp_path))})
    monkeypatch.setattr(record, "Store", lambda url: pytest.fail(f"asked {url}"))
    [shown] = rows(str(tmp_path), read_record(str(tmp_path)) or {})
    assert shown["state"] == "not started"


def test_a_table_is_aligned(told: Told) -> None:
    told(table([{"trial": "a", "seed": "1", "state": "finished", "step": 5, "loss": 1.5, "val_loss": None}]))
