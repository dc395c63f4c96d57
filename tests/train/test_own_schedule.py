"""schedule._target_: the learning rates are the function's, exactly; what is none is told before a run begins."""

import math
import re
from pathlib import Path

import pytest

from mingpt.cli import cli
from mingpt.history.history import read_metrics
from mingpt.replay.replaying import replay
from mingpt.snapshot.store import Store
from tests.kits.config_kit import problems
from tests.kits.paths_kit import ROOT
from tests.kits.replay_kit import train_here
from tests.kits.told import Told

OWN = "schedule._target_=examples.own_schedule.one_minus_sqrt"


def test_the_learning_rates_are_those_of_the_function(tmp_path: Path, text: Path, cache: Path) -> None:
    places = f"data.path={text}", f"data.cache_dir={cache}"
    own = "train.max_steps=12", "schedule.decay_steps=12", "schedule.cooldown=0.5", OWN
    train_here(f"{tmp_path}/run", *places, *own, "optimizer.lr=0.5", "schedule.min_ratio=0", "snapshot.every_steps=6")
    rates = [row["lr"] for row in read_metrics(f"{tmp_path}/run")]
    assert rates == [0.5 * r for r in (*(n / 5 for n in range(1, 5)), 1, 1, *(1 - math.sqrt(n / 6) for n in range(6)))]
    with replay(f"{tmp_path}/run", 8, (*places, OWN)) as past:
        again = [past.advance() for _ in range(2)]
    assert [(step.same, step.lr) for step in again] == [(True, rate) for rate in rates[6:8]]
    assert past.notes == []
    assert cli.run("snapshots", ["prune", f"{tmp_path}/run", "--keep", "1", "--no-keep-best"]) == 0
    assert Store(f"{tmp_path}/run/snapshots").steps() == [12]


@pytest.mark.parametrize(
    "given",
    [
        "tests.kits.own_kit.without_step",
        "tests.kits.own_kit.by_chance",
        "tests.kits.own_kit.falls_below schedule.by=0.1",
        "tests.kits.own_kit.falls_below schedule.buy=0.1",
        "tests.kits.own_kit.divides",
        "tests.kits.own_kit.CLASSIFIER",
    ],
)
def test_what_is_no_schedule_is_a_mistake_before_anything_starts(given: str, told: Told) -> None:
    text = "\n".join(problems(*f"schedule._target_={given}".split()))
    told(re.sub(r"gives [\d.]+ for|line \d+", "…", text), ROOT)
