"""mingpt.observe.jsonl: one segment an attempt, merged by step; newer attempts replace what was beyond their start."""

import math
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import pytest

from mingpt.history.history import read_metrics
from mingpt.observe.events import AttemptEnded, StepDone
from mingpt.observe.jsonl import MetricsLog
from mingpt.snapshot.attempts import REWIND, Attempt, newest_number


@pytest.fixture(params=["local", "memory"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A run directory on a disk, and one where nothing can be appended to, as in a bucket."""
    return str(tmp_path / "run") if request.param == "local" else f"memory://{uuid4().hex}/run"


def log(run_dir: object, attempt: int, *rows: Mapping[str, object]) -> None:
    segment = MetricsLog(str(run_dir), attempt, print)
    for row in rows:
        segment.write(row)
    segment.file.close()


def told(run_dir: object) -> list[tuple[int, int]]:
    return [(row["attempt"], row["step"]) for row in read_metrics(str(run_dir))]


def test_a_newer_attempt_replaces_what_older_ones_have_measured_beyond_its_first_step(run_dir: str) -> None:
    """Steps 30 and 40 of attempt 1 and 30 of attempt 2 were computed again, or never again: they led to no snapshot.

    The figures of two attempts are never mixed in one step; a step's own validation loss joins it.
    """
    assert read_metrics(run_dir) == []
    log(run_dir, 1, *({"step": s, "loss": 1.0 + s} for s in (10, 20, 30, 40)), {"step": 10, "val_loss": 2.1})
    log(run_dir, 3, {"step": 30, "loss": 3.3})
    log(run_dir, 2, {"step": 20, "loss": 2.2}, {"step": 25, "val_loss": 2.25}, {"step": 30, "world_size": 4})
    assert read_metrics(run_dir) == [
        {"attempt": 1, "step": 10, "loss": 11.0, "val_loss": 2.1},
        {"attempt": 2, "step": 20, "loss": 2.2},
        {"attempt": 2, "step": 25, "val_loss": 2.25},
        {"attempt": 3, "step": 30, "loss": 3.3},
    ]


@pytest.mark.parametrize(
    ("claims", "kept"),
    [
        # Attempt 2 says itself that it goes on from step 12; then a rewind to step 15, which measures nothing.
        ([(0, 0, (10, 20, 30)), (12, 1, (20,)), (15, 1, ())], [(1, 10)]),
        # Attempt 2 died; attempt 3 found what attempt 1 had left in a node's memory.
        ([(0, 0, (10, 20, 30)), (12, 1, (20,)), (30, 1, (40,))], [(1, 10), (1, 20), (1, 30), (3, 40)]),
    ],
)
def test_what_an_attempt_grew_from_counts_and_not_its_number(
    run_dir: str, claims: list[tuple[int, int, tuple[int, ...]]], kept: list[tuple[int, int]]
) -> None:
    for number, (start, parent, steps) in enumerate(claims, 1):
        assert Attempt.claim(run_dir, start, "d", parent, by="train" if steps else REWIND).number == number
        if steps:
            log(run_dir, number, *({"step": s} for s in steps))
    assert told(run_dir) == kept


@pytest.mark.parametrize(("cut", "steps"), [(1, [1, 2, 3]), (10, [1, 3])])  # without its newline only, it is whole
def test_what_a_killed_attempt_left_half_written_and_what_is_no_row_are_passed_over(
    tmp_path: Path, cut: int, steps: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """What is damaged is told; an end that is missing is no damage."""
    log(tmp_path, 1, {"step": 1}, {"step": 2, "loss": 1.5})
    first, second = (tmp_path / f"metrics/attempt-0000{number}.jsonl" for number in (1, 2))
    first.write_bytes(first.read_bytes()[:-cut])
    log(tmp_path, 2, {"step": 3})
    with second.open("a") as file:
        file.write('[1]\n{"step": "2"}\n{"loss": 1}\n' + "[" * 100_000 + "\n")
    for name in ("attempt-00099.jsonl.tmp", "attempt-99.jsonl", "notes-00099.jsonl", "Xattempt-00099.jsonl"):
        (tmp_path / "metrics" / name).write_text('{"attempt": 99, "step": 1}\n')
    assert [step for _, step in told(tmp_path)] == steps
    assert capsys.readouterr().err == f"{second}: 2 damaged lines left out\n"
    assert newest_number(str(tmp_path)) == 2


def test_a_line_is_there_at_once_on_a_disk_and_after_each_flush_in_a_bucket(run_dir: str) -> None:
    segment = MetricsLog(run_dir, 1, print)
    for step in (1, 2):
        segment.write({"step": step})
        assert (1, step) in told(run_dir) or run_dir.startswith("memory")
        segment.file.flush()
        assert told(run_dir)[-1] == (1, step)
    segment.write({"step": 3})
    segment.on(AttemptEnded(3, True, None))
    segment.write({"step": 4})  # of another observer that ends later
    assert told(run_dir) == [(1, 1), (1, 2), (1, 3), (1, 4)]


def test_a_segment_has_json_lines_with_the_names_that_all_observers_use(tmp_path: Path) -> None:
    """JSON has no word for what is not finite. A peak that is not known is left out, and so is a step not logged."""
    metrics = MetricsLog(str(tmp_path), 12, print)
    for done in (StepDone(1, 2.0, 1.0, logged=False), StepDone(2, math.nan, 1.0), StepDone(3, 2.0, math.inf, mfu=0.5)):
        metrics.on(done)
    rest = (
        '"lr": 0.0, "tokens_per_second": 0.0, "step_seconds": 0.0, "tokens_seen": 0, "seconds_left": 0.0, '
        '"peak_memory": 0, '
    )
    [segment] = (tmp_path / "metrics").iterdir()
    assert (segment.name, segment.read_text()) == (
        "attempt-00012.jsonl",
        f'{{"attempt": 12, "step": 2, "loss": null, "grad_norm": 1.0, {rest}"world_size": 1}}\n'
        f'{{"attempt": 12, "step": 3, "loss": 2.0, "grad_norm": null, {rest}"mfu": 0.5, "world_size": 1}}\n',
    )
