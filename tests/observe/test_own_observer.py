"""observers=[{_target_: …}]: each event comes, in order; what fails, quits or hangs harms no run, and is told."""

import csv
import re
from pathlib import Path

import pytest

from mingpt.history.history import read_metrics
from mingpt.observe import own
from mingpt.observe.events import AttemptEnded
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from tests.kits.config_kit import problems
from tests.kits.own_kit import SEEN
from tests.kits.replay_kit import train_here
from tests.kits.told import Told


def observers(*names: str) -> str:
    return f"observers=[{', '.join(f'{{_target_: {name}}}' for name in names)}]"


def test_observers_get_each_event_in_order_and_what_fails_quits_or_hangs_is_told_and_changes_nothing(
    tmp_path: Path,
    text: Path,
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    told: Told,
) -> None:
    monkeypatch.setattr(own, "END_SECONDS", 1.0)
    run = (
        f"data.path={text}",
        f"data.cache_dir={cache}",
        "train.max_steps=4",
        "train.eval_every=2",
        "train.log_every=2",
    )
    train_here(f"{tmp_path}/alone", *run)
    capsys.readouterr()
    SEEN.clear()
    ours = [f"tests.kits.own_kit.{name}" for name in ("Fails", "Quits", "Hangs", "NotMade", "Recorder")]
    train_here(f"{tmp_path}/run", *run, observers(*ours, "examples.own_observer.Table"))
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("observers: ")]
    told([re.sub(r"\([^()]*, line \d+\)", "(…)", line) for line in sorted(said)], tmp_path)
    names = [f"{type(event).__name__} {getattr(event, 'step', 0)}" for event in SEEN]
    assert [name for name in names if not name.startswith("Evaluating")] == [
        "AttemptStarted 0", "StepDone 1", "StepDone 2", "Evaluated 2", "StepDone 3", "StepDone 4", "Evaluated 4",
        "SnapshotCommitted 4", "AttemptEnded 4",
    ]  # fmt: skip
    assert isinstance(SEEN[-1], AttemptEnded)
    alone, with_them = (read(Store(f"{tmp_path}/{name}/snapshots"), 4).manifest.digest for name in ("alone", "run"))
    assert SEEN[-1].digest == with_them == alone
    # The example's table has the figures of the metrics.
    rows = list(csv.DictReader((tmp_path / "run/table-1.csv").open()))
    metrics = read_metrics(f"{tmp_path}/run")
    figures = "step", "loss", "lr", "grad_norm"
    assert [[row[name] for name in figures] for row in rows] == [
        [str(row[name]) for name in figures] for row in metrics
    ]
    assert [row["val_loss"] for row in rows] == ["nan", str(metrics[0]["val_loss"])]  # that of the step before


@pytest.mark.parametrize("given", ["no_such.Thing", "tests.kits.own_kit.Linear", "tests.kits.own_kit.NotMade, why: 3"])
def test_what_cannot_be_an_observer_is_a_mistake_before_anything_starts(given: str, told: Told) -> None:
    told(problems(observers(given)))
