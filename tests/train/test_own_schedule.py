"""schedule._target_: the learning rates are the function's, exactly; what is none is told before a run begins."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mingpt.cli import cli
from mingpt.compose.stored import replay_config
from mingpt.errors import UserError
from mingpt.history.history import read_metrics
from mingpt.replay.replaying import replay
from mingpt.snapshot.format import Manifest
from mingpt.snapshot.store import Store
from mingpt.train import resume
from tests.kits.config_kit import configured, problems
from tests.kits.paths_kit import ROOT
from tests.kits.replay_kit import train_here
from tests.kits.snapshot_kit import ALONE, PROVENANCE
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


def checked(config: dict[str, Any], *now: str) -> list[str]:
    """What is said of a resume at step 50."""
    said, numerics = list[str](), {"data": "d" * 64}
    fields = PROVENANCE | {"config": config, "fingerprint": numerics}
    manifest = Manifest(format=3, step=50, digest="0" * 64, parts={}, tensors={}, **fields)
    resume.check(manifest, configured(*now), numerics, ALONE, said.append)
    return said


def test_a_run_is_extended_exactly_where_its_own_schedule_says_so() -> None:
    own = OWN, "schedule.warmup_steps=0"
    before = configured(*own).model_dump()
    (line,) = checked(before, *own, "schedule.decay_steps=900", "schedule.cooldown=0.3")
    assert line.endswith("the bits are those of a run planned so before")
    with pytest.raises(UserError, match=r"schedule.cooldown: None -> 0.96"):
        checked(before, *own, "schedule.cooldown=0.96")


def test_code_that_a_snapshot_names_is_not_imported_for_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evilplan.py").write_text("def fall(step):\n    return 1")
    stored = configured("schedule._target_=evilplan.fall").model_dump()
    (tmp_path / "evilplan.py").write_text("raise SystemExit(3)")
    monkeypatch.delitem(sys.modules, "evilplan")
    for given in ((), (OWN,)):
        with pytest.raises(UserError, match=r"schedule._target_: evilplan.fall -> "):
            checked(stored, *given)
    with pytest.raises(UserError, match=r"schedule\._target_ names code of one's own"):
        replay_config(stored, "runs/x")
