"""Batches that would spoil the weights: skipped, named, and after too many of them left out for ever."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mingpt.errors import CRASHED, FINISHED, USER_ERROR
from mingpt.snapshot.attempts import records
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from tests.kits.poison_kit import GUARDED, MICRO, PLAN, POISONED, poison
from tests.kits.told import Told

pytestmark = pytest.mark.usefixtures("outlived")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"{tmp_path}/run/snapshots")


def dropped(store: Store, step: int) -> list[list[int]]:
    return [r for r in read(store, step).state["optimizer"]["health.dropped"].tolist() if r[0] >= 0]


@pytest.mark.parametrize("times", [1e3, 1e25])
def test_a_bad_batch_is_skipped_and_named(
    train: Callable[..., int], store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], times: float
) -> None:
    assert train("health.spike_sigma=8", *poison([20], times)) == FINISHED
    rows = [json.loads(line) for line in (tmp_path / "run/metrics/attempt-00001.jsonl").read_text().splitlines()]
    assert [(row["step"], row["skipped"]["microbatches"]) for row in rows if "skipped" in row] == [(21, [1])]
    first, second = PLAN.sample_ids(20)[MICRO : 2 * MICRO].tolist()
    assert f"(samples {first}, {second})" in capsys.readouterr().out
    assert read(store, 36).state["optimizer"]["layer.weight.step"] == 35


def test_after_too_many_skips_a_run_goes_back_and_never_shows_these_batches_again(
    train: Callable[..., int], store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str], told: Told
) -> None:
    overrides = (*GUARDED, *poison([17, 18]))
    assert train(*overrides) == CRASHED
    told(capsys.readouterr().err.rpartition("error: ")[2], tmp_path)
    assert store.steps() == [15, 10, 5]
    assert [(r.by, r.from_step, r.dropped) for r in records(f"{tmp_path}/run").values()][1:] == [
        ("rewind", 15, (17, 19))
    ]
    assert train(*overrides) == FINISHED
    assert "SKIPPED" not in capsys.readouterr().out
    assert dropped(store, 36) == [[17, 19]]
    assert dropped(store, 15) == []
    assert read(store, 36).state["optimizer"]["layer.weight.step"] == 36
    # As a run that never had them, up to what it remembers of them.
    clean = f"{tmp_path}/clean"
    assert attempt([*POISONED, *GUARDED, *poison([]), f"run.dir={clean}", "train.max_steps=17"], Lifetime()) == FINISHED
    ours, theirs = (read(Store(f"{place}/snapshots"), 15).manifest.digest for place in (f"{tmp_path}/run", clean))
    assert ours == theirs


@pytest.mark.parametrize(
    ("settings", "codes", "steps"),
    [
        ((*GUARDED, *poison([17, 18, 25, 26])), [CRASHED, USER_ERROR], [20, 15, 10, 5]),
        ((*GUARDED, *poison([9, 10]), "snapshot.every_steps=0"), [USER_ERROR], []),
        ((*GUARDED, *poison([17, 18]), "health.max_rollbacks=0"), [USER_ERROR], [15, 10, 5]),
        (poison([35], 1e25), [USER_ERROR], [35, 30, 25, 20, 15, 10, 5]),
    ],
    ids=["gone back often enough", "nothing to go back to", "not allowed to go back", "the last loss is no number"],
)
def test_a_run_that_has_diverged_ends_and_its_good_snapshots_stay(
    train: Callable[..., int],
    settings: tuple[str, ...],
    codes: list[int],
    steps: list[int],
    store: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    told: Told,
) -> None:
    assert [train(*settings) for _ in codes] == codes
    assert store.steps() == steps
    told(capsys.readouterr().err.rpartition("error: ")[2], tmp_path)
