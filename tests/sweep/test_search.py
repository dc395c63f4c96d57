"""A search by Optuna, and the median stopper. Trials are stand-ins, which write what a run writes; one test is real."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mingpt.commands import sweep
from mingpt.errors import UserError
from mingpt.sweep import local, median
from mingpt.sweep.expand import Trial
from mingpt.sweep.record import read_record
from mingpt.sweep.search import JOURNAL, Search

WAIT = 120.0
STEPS = 6
# Its loss is |log10(lr) + 3| + seed. SAYS says of its name: `fail`, or `hold`: wait to be asked to stop.
TRIAL = """
import json, math, os, pathlib, signal, sys, time
overrides = dict(a.split("=", 1) for a in sys.argv[1:])
folder, asked = pathlib.Path(overrides["run.dir"]), []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
says = json.loads(os.environ["SAYS"]).get(folder.name, "")
if says == "fail":
    sys.exit(64)
(folder / "metrics").mkdir(parents=True, exist_ok=True)
number = len(list((folder / "metrics").iterdir())) + 1
loss = abs(math.log10(float(overrides.get("optimizer.lr", "1e-3"))) + 3) + int(overrides.get("seed", "0"))
with open(folder / f"metrics/attempt-{number:05d}.jsonl", "w", buffering=1) as file:
    for step in range(1, STEPS + 1):
        file.write(json.dumps({"step": step, "val_loss": loss}) + chr(10))
        until = time.time() + 60
        while says == "hold" and step == STEPS - 1 and not asked and time.time() < until:
            time.sleep(0.01)
        if asked:
            sys.exit(75)
last = folder / f"snapshots/step-{STEPS:08d}"
last.mkdir(parents=True)
(last / "manifest.json").write_text("{}")
"""


@pytest.fixture
def does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `mingpt sweep` with stand-ins for trials."""
    from mingpt.snapshot.store import Store

    source = TRIAL.replace("STEPS", str(STEPS)).replace("step-{6:08d}", Path(Store("x").folder(STEPS)).name)
    monkeypatch.setattr(local, "command", lambda trial, n: [sys.executable, "-c", source, *trial.arguments])
    monkeypatch.setattr(local, "LOOK_SECONDS", 0.01)

    def run(*arguments: str, **says: str) -> int:
        monkeypatch.setenv("SAYS", json.dumps({name.replace("_", "-", 1): what for name, what in says.items()}))
        fixed = [f"--dir={tmp_path}", f"train.max_steps={STEPS}", "train.eval_every=1"]
        return sweep.main([*fixed, *arguments])

    return run


def values(folder: Path) -> list[str]:
    return [next(iter(entry.values.values())) for entry in (read_record(str(folder)) or {}).values()]


SEARCH = ("optimizer.lr=tag(log, interval(1e-5,1e-1))", "--optimize=val_loss")


def test_a_search_in_two_parts_draws_what_one_draws(
    does: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert does(*SEARCH, "--trials=14", "--name=one") == 0
    assert does(*SEARCH, "--trials=12", "--name=two") == 0
    assert does(*SEARCH, "--trials=14", "--name=two") == 0
    drawn = values(tmp_path / "one")
    assert len(drawn) == 14
    assert drawn == values(tmp_path / "two")
    assert all(1e-5 <= float(value) <= 1e-1 for value in drawn)
    capfd.readouterr()
    assert does(*SEARCH, "--trials=14", "--name=two") == 0
    assert "started" not in capfd.readouterr().out
    assert does("optimizer.lr=interval(1e-5,1e-1)", SEARCH[1], "--trials=14", "--name=two") == 64
    assert "has another search (other: space)" in capfd.readouterr().err


def test_a_stopped_search_runs_the_same_trial_again(does: Callable[..., int], tmp_path: Path) -> None:
    how = ("seed=range(5,7)", "--optimize=val_loss", "--trials=6", "--parallel=2")
    ask_to_stop(lambda: len(list(tmp_path.glob("sweep/seed-*/metrics/*"))) == 2)
    assert does(*how, seed_5="hold", seed_6="hold") == 75
    journal = tmp_path / "sweep" / JOURNAL
    with journal.open("a") as file:
        file.write('{"half of a li')
    assert does(*how) == 0
    assert sorted(values(tmp_path / "sweep")) == ["5", "6"]  # six draws of two values: each is trained once
    assert all(len(list(tmp_path.glob(f"sweep/seed-{n}/metrics/*"))) == 2 for n in (5, 6))
    journal.write_text("nonsense\nnonsense\n")
    assert does(*how) == 64


def ask_to_stop(when: Callable[[], object]) -> threading.Thread:
    """Sends this process a SIGTERM, once something is there."""

    def wait() -> None:
        until = time.monotonic() + WAIT
        while not when() and time.monotonic() < until:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_a_search_goes_on_without_a_trial_that_fails(does: Callable[..., int], tmp_path: Path) -> None:
    how = ("seed=choice(5,6,7)", "--optimize=val_loss", "--trials=12")
    assert does(*how, seed_5="fail") == 64
    assert sorted(values(tmp_path / "sweep")) == ["5", "6", "7"]
    assert does(*how) == 64


def test_what_can_not_be_searched(does: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
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
        assert does(*arguments) == 64, arguments
        assert said in capfd.readouterr().err, arguments
    assert does("seed=1,2", "--prune=median", "train.max_steps=3", "train.eval_every=3", "--dry-run") == 64
    assert "--prune: train.eval_every" in capfd.readouterr().err
    assert does("seed=1,2", "--optimize=loss", "--trials=3", "--dry-run") == 0
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
    does: Callable[..., int], how: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(median, "FIRST", 2)
    monkeypatch.setattr(median, "LOOK_SECONDS", 0.05)
    assert does("seed=1,2") == 0
    more = ("seed=1,2,9", "--prune=median", *how)
    assert does(*more, seed_9="hold") == 0
    known = read_record(str(tmp_path / "sweep")) or {}
    assert {name: entry.pruned for name, entry in known.items()} == {"seed-1": False, "seed-2": False, "seed-9": True}
    assert "seed-9: pruned" in (told := capfd.readouterr().out)
    assert "is above the median" in told
    assert does(*more) == 0
    assert "started" not in (told := capfd.readouterr().out)
    assert "9     pruned" in told
