"""What a sweep on this machine does with trials that fail, a search, and requests to stop. Trials are stand-ins."""

import json
import math
import signal
from pathlib import Path

import pytest

from mingpt.errors import UserError
from mingpt.sweep import local, median
from mingpt.sweep.record import read_record
from mingpt.sweep.search import JOURNAL, Search
from sweep_kit import Sweeps, meanwhile, wait_for


@pytest.fixture
def sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweeps:
    return Sweeps(tmp_path, monkeypatch)


def attempts(folder: Path, *seeds: int) -> list[int]:
    return [len(list((folder / f"sweep/seed-{seed}/metrics").glob("*"))) for seed in seeds]


def test_a_trial_that_fails_ends_no_other_and_the_exit_code_says_so(
    sweeps: Sweeps, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweeps("seed=1,2,3", "--parallel=2", seed_1="fail") == 64
    assert "seed-1: " in capfd.readouterr().err
    assert attempts(tmp_path, 1, 2, 3) == [0, 1, 1]
    assert sweeps("seed=1,2,3", "--parallel=2", seed_1="crash") == 70
    assert sweeps("seed=1,2,3") == 0
    assert attempts(tmp_path, 1, 2, 3) == [1, 1, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_stop_stops_the_trials_and_the_next_start_finishes_them(
    sweeps: Sweeps, tmp_path: Path, number: int
) -> None:
    meanwhile(lambda: wait_for(lambda: attempts(tmp_path, 1, 2) == [1, 1]), number)
    assert sweeps("seed=1,2,3", "--parallel=2", seed_1="hold", seed_2="hold") == 75
    assert attempts(tmp_path, 1, 2, 3) == [1, 1, 0]
    assert sweeps("seed=1,2,3") == 0
    assert attempts(tmp_path, 1, 2, 3) == [2, 2, 1]


def test_a_trial_that_does_not_stop_is_killed(
    sweeps: Sweeps, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    meanwhile(lambda: wait_for(lambda: attempts(tmp_path, 1) == [1]))
    assert sweeps("seed=1,2", "launch.shutdown_timeout_seconds=1", seed_1="ignore") == 75
    assert "seed-1: killed by SIGKILL" in capfd.readouterr().err


def test_a_second_sweep_at_the_same_time_is_refused(
    sweeps: Sweeps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "ORPHANS_SECONDS", 0.05)
    codes = list[int]()

    def second() -> None:
        wait_for(lambda: attempts(tmp_path, 1) == [1])
        codes.append(sweeps("seed=1,2", seed_1="hold"))

    meanwhile(second)
    assert sweeps("seed=1,2", seed_1="hold") == 75
    assert codes == [64]


# --- searches ---

SEARCH = ("optimizer.lr=tag(log, interval(1e-5,1e-1))", "--optimize=val_loss")


def values(folder: Path) -> list[str]:
    return sorted(next(iter(entry.values.values())) for entry in (read_record(f"{folder}/sweep") or {}).values())


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


def test_a_search_that_has_ended_starts_nothing_and_is_no_other(sweeps: Sweeps, tmp_path: Path) -> None:
    assert sweeps(*SEARCH, "--trials=2") == 0
    before = sorted(tmp_path.glob("sweep/*/metrics/*"))
    assert len(before) == 2
    assert sweeps(*SEARCH, "--trials=2") == 0
    assert sweeps("optimizer.lr=interval(1e-5,1e-1)", SEARCH[1], "--trials=2") == 64
    assert sorted(tmp_path.glob("sweep/*/metrics/*")) == before


def test_a_stopped_search_runs_the_same_trial_again(sweeps: Sweeps, tmp_path: Path) -> None:
    how = ("seed=range(5,7)", "--optimize=val_loss", "--trials=6", "--parallel=2")
    meanwhile(lambda: wait_for(lambda: attempts(tmp_path, 5, 6) == [1, 1]))
    assert sweeps(*how, seed_5="hold", seed_6="hold") == 75
    journal = tmp_path / "sweep" / JOURNAL
    with journal.open("a") as file:
        file.write('{"half of a li')
    assert sweeps(*how) == 0
    assert values(tmp_path) == ["5", "6"]  # six draws of two values: each is trained once
    assert attempts(tmp_path, 5, 6) == [2, 2]
    journal.write_text("nonsense\nnonsense\n")
    assert sweeps(*how) == 64


def test_a_search_goes_on_without_a_trial_that_fails(sweeps: Sweeps, tmp_path: Path) -> None:
    how = ("seed=choice(5,6,7)", "--optimize=val_loss", "--trials=9")
    assert sweeps(*how, seed_5="fail") == 64
    assert values(tmp_path) == ["5", "6", "7"]
    assert sweeps(*how) == 64


def test_kinds_of_values() -> None:
    with_all = ["optimizer.lr=interval(1e-4,1e-2)", "seed=int(interval(1,9))", "train.threads=range(1,7,2)"]
    search = Search([], [*with_all, "schedule=glob(c*)", "train.max_steps=5"], "runs/s", "loss", 3, 1)
    trial, config = search.first()
    assert 1e-4 <= config.optimizer.lr <= 1e-2
    assert 1 <= config.seed <= 9
    assert config.train.threads in (1, 3, 5)
    assert trial.values["schedule"] in ("constant", "cosine")
    assert trial.arguments[0] == "train.max_steps=5"
    with pytest.raises(UserError, match="seed"):
        Search([], ["seed=1,2", "seed=3,4"], "runs/s", "loss", 3, 1)


@pytest.mark.parametrize("how", [("--optimize=val_loss", "--trials=5"), ()])
def test_a_trial_worse_than_the_median_is_stopped_for_good(
    sweeps: Sweeps, how: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(median, "FIRST", 2)
    monkeypatch.setattr(median, "LOOK_SECONDS", 0.05)
    assert sweeps("seed=1,2") == 0
    more = ("seed=1,2,9", "--prune=median", *how)
    for _ in range(2):
        assert sweeps(*more, seed_9="hold") == 0
        known = read_record(str(tmp_path / "sweep")) or {}
        assert {name for name, entry in known.items() if entry.pruned} == {"seed-9"}
        assert attempts(tmp_path, 1, 2, 9) == [1, 1, 1]
