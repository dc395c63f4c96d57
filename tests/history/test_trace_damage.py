"""A trace records each step of an attempt once and in order. Whoever reads it names the first one that it does not."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mingpt.observe.trace import RECORD, Records
from mingpt.report.reading import Run
from tests.kits.report_kit import loss_of, three_attempts
from tests.kits.verb_kit import mingpt


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trace(attempt: int) -> Path:
    (path,) = Path("run/trace").glob(f"attempt-{attempt:05d}-*.bin")
    return path


def change(attempt: int, how: Callable[[Records], Records]) -> None:
    how(np.fromfile(trace(attempt), RECORD)).tofile(trace(attempt))


def flipped(found: Records) -> Records:
    found["step"][3] ^= 1 << 12
    return found


DAMAGED: list[tuple[str, int, Callable[[Records], Records], str]] = [
    ("a hole", 2, lambda found: np.delete(found, 3), "in place of step 14 it has step 15"),
    ("a hole at the beginning", 2, lambda found: found[1:], "in place of step 11 it has step 12"),
    ("the whole twice", 2, lambda found: np.concatenate([found, found]), "in place of step 21 it has step 11"),
    ("a flipped bit in the newest", 3, flipped, "in place of step 24 it has step 4,120"),
    ("cut, though it has ended", 2, lambda found: found[:5], "step 16 and those after it are missing"),
    ("empty, though it has ended", 3, lambda found: found[:0], "step 21 and those after it are missing"),
]


@pytest.mark.parametrize(("attempt", "how", "what"), [row[1:] for row in DAMAGED], ids=[row[0] for row in DAMAGED])
def test_the_first_step_that_is_not_where_it_should_be_is_named_once(
    attempt: int, how: Callable[[Records], Records], what: str
) -> None:
    three_attempts("run").snapshot(30)
    change(attempt, how)
    run = Run("run")
    line = f"the trace of attempt {attempt} is damaged: {what}"
    assert run.past.trace_damage == {attempt: line}
    # What is left of it, and the metrics: nothing of what comes after the damage is believed.
    assert (run.kept, run.last_step) == ({1: 10, 2: 20, 3: 30}, 30)
    assert run.loss.steps.tolist() == [*range(1, 31)]
    assert run.loss.values.tolist() == [loss_of(step) for step in range(1, 31)]
    assert mingpt("log run").count(line) == 1
    [told] = [a for a in mingpt.json("log run")[0]["attempts"] if a["trace_damage"]]
    assert (told["attempt"], told["trace_damage"]) == (attempt, line)
    mingpt("report run --out page.html")
    assert Path("page.html").read_text().count(line) == 1


def test_a_killed_attempt_may_lack_its_last_steps() -> None:
    three_attempts("run").snapshot(30)
    change(1, lambda found: found[:5])
    with trace(1).open("ab") as file:
        file.write(b"\0" * 7)  # a record that it was writing
    run = Run("run")
    assert (run.past.trace_damage, run.kept) == ({}, {1: 10, 2: 20, 3: 30})
    assert run.loss.steps.tolist() == [*range(1, 31)]
    assert "damaged" not in mingpt("log run")
