"""A search by Optuna, and the median stopper. Trials are stand-ins; test_sweep.py has a search with real ones."""

import json
import math
from pathlib import Path

import pytest

from mingpt.errors import UserError
from mingpt.sweep import median
from mingpt.sweep.expand import Trial
from mingpt.sweep.record import read_record
from mingpt.sweep.search import JOURNAL, Search
from sweep_kit import Sweeps, meanwhile, wait_for


def values(folder: Path) -> list[str]:
    return [next(iter(entry.values.values())) for entry in (read_record(str(folder)) or {}).values()]


SEARCH = ("optimizer.lr=tag(log, interval(1e-5,1e-1))", "--optimize=val_loss")


def drawn(folder: Path, *numbers: int) -> list[str]:
    """The values of a search in parts: up to these numbers of trials. What a trial comes to follows from its value."""
    found = list[str]()
    folder.mkdir()
    for number in numbers:
        search = Search([], [SEARCH[0], "train.max_steps=5"], str(folder), "val_loss", number, 1)
        search.open()
        for trial, _ in search.jobs():
            found.append(trial.values["optimizer.lr"])
            (Path(trial.folder) / "metrics").mkdir(parents=True)
            row = {"step": 5, "val_loss": abs(math.log10(float(found[-1])) + 3)}
            (Path(trial.folder) / "metrics/attempt-00001.jsonl").write_text(json.dumps(row))
            search.ended(trial, 0, False)
    return found


def test_a_search_in_parts_draws_what_one_draws(tmp_path: Path) -> None:
    whole = drawn(tmp_path / "whole", 14)
    assert whole == drawn(tmp_path / "parts", 3, 12, 14)
    assert len(set(whole)) == 14
    assert all(1e-5 <= float(value) <= 1e-1 for value in whole)


def test_a_search_that_has_ended_starts_nothing_and_is_no_other(
    sweeps: Sweeps, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweeps(*SEARCH, "--trials=2") == 0
    assert capfd.readouterr().out.count("started") == 2
    assert sweeps(*SEARCH, "--trials=2") == 0
    assert "started" not in capfd.readouterr().out
    assert sweeps("optimizer.lr=interval(1e-5,1e-1)", SEARCH[1], "--trials=2") == 64
    assert "has another search (other: space)" in capfd.readouterr().err


def test_a_stopped_search_runs_the_same_trial_again(sweeps: Sweeps, tmp_path: Path) -> None:
    how = ("seed=range(5,7)", "--optimize=val_loss", "--trials=6", "--parallel=2")
    meanwhile(lambda: wait_for(lambda: len(list(tmp_path.glob("sweep/seed-*/metrics/*"))) == 2))
    assert sweeps(*how, seed_5="hold", seed_6="hold") == 75
    journal = tmp_path / "sweep" / JOURNAL
    with journal.open("a") as file:
        file.write('{"half of a li')
    assert sweeps(*how) == 0
    assert sorted(values(tmp_path / "sweep")) == ["5", "6"]  # six draws of two values: each is trained once
    assert all(len(list(tmp_path.glob(f"sweep/seed-{n}/metrics/*"))) == 2 for n in (5, 6))
    journal.write_text("nonsense\nnonsense\n")
    assert sweeps(*how) == 64


def test_a_search_goes_on_without_a_trial_that_fails(sweeps: Sweeps, tmp_path: Path) -> None:
    how = ("seed=choice(5,6,7)", "--optimize=val_loss", "--trials=9")
    assert sweeps(*how, seed_5="fail") == 64
    assert sorted(values(tmp_path / "sweep")) == ["5", "6", "7"]
    assert sweeps(*how) == 64


def test_what_can_not_be_searched(sweeps: Sweeps, capfd: pytest.CaptureFixture[str]) -> None:
    for arguments, said in {
        ("seed=1,2", "--optimize=val_loss"): "--optimize and --trials belong together",
        ("seed=1,2", "--trials=3"): "--optimize and --trials belong together",
        ("seed=1", "--optimize=val_loss", "--trials=3"): "nothing to search",
        ("seed=interval(2,1)", "--optimize=val_loss", "--trials=3"): "seed=interval(2,1): ",
        ("optimizer.lr=tag(log, interval(0,1))", "--optimize=val_loss", "--trials=3"): "tag(log, interval(0,1)): ",
        ("seed=tag(log, choice(1,2))", "--optimize=val_loss", "--trials=3"): "write tag(log, interval(a,b))",
        ("seed=1,2", "--optimize=val_loss", "--trials=3", "--zip"): "leave out --zip or --optimize",
        ("seed=1,2", "--optimize=val_loss", "--trials=3", "--on=slurm"): "--optimize: for --on local only",
        ("seed=1,2", "--prune=median", "--on=slurm"): "--prune: for --on local only",
        ("optimizer.lr=interval(-2,-1)", "--optimize=val_loss", "--trials=3"): "optimizer.lr=-2",
    }.items():
        assert sweeps(*arguments) == 64, arguments
        assert said in capfd.readouterr().err, arguments
    assert sweeps("seed=1,2", "--prune=median", "train.max_steps=3", "train.eval_every=3", "--dry-run") == 64
    assert "--prune: train.eval_every" in capfd.readouterr().err
    assert sweeps("seed=1,2", "--optimize=loss", "--trials=3", "--dry-run") == 0
    assert "# the first trial; the others follow from results" in capfd.readouterr().out


def test_kinds_of_values() -> None:
    with_all = ["optimizer.lr=interval(1e-4,1e-2)", "seed=int(interval(1,9))", "train.threads=range(1,7,2)"]
    search = Search([], [*with_all, "schedule=glob(c*)", "train.max_steps=5"], "runs/s", "loss", 3, 1)
    trial, config = search.first()
    assert isinstance(trial, Trial)
    assert 1e-4 <= config.optimizer.lr <= 1e-2
    assert 1 <= config.seed <= 9
    assert config.train.threads in (1, 3, 5)
    assert trial.values["schedule"] in ("constant", "cosine")
    assert trial.arguments[0] == "train.max_steps=5"
    with pytest.raises(UserError, match="swept twice"):
        Search([], ["seed=1,2", "seed=3,4"], "runs/s", "loss", 3, 1)


@pytest.mark.parametrize("how", [("--optimize=val_loss", "--trials=5"), ()])
def test_a_trial_worse_than_the_median_is_stopped_for_good(
    sweeps: Sweeps, how: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(median, "FIRST", 2)
    monkeypatch.setattr(median, "LOOK_SECONDS", 0.05)
    assert sweeps("seed=1,2") == 0
    more = ("seed=1,2,9", "--prune=median", *how)
    assert sweeps(*more, seed_9="hold") == 0
    known = read_record(str(tmp_path / "sweep")) or {}
    assert {name: entry.pruned for name, entry in known.items()} == {"seed-1": False, "seed-2": False, "seed-9": True}
    assert "seed-9: pruned" in (told := capfd.readouterr().out)
    assert "is above the median" in told
    assert sweeps(*more) == 0
    assert "started" not in (told := capfd.readouterr().out)
    assert "9     pruned" in told
