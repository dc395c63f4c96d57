"""mingpt.observe.jsonl: one segment an attempt, merged by step; newer attempts replace what was beyond their start."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from mingpt.observe.console import step_line
from mingpt.observe.events import StepDone
from mingpt.observe.jsonl import MetricsLog, read_metrics
from mingpt.snapshot.attempts import REWIND, Attempt, newest_number


@pytest.fixture(params=["local", "memory"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A run directory on a disk, and one where nothing can be appended to, as in a bucket."""
    if request.param == "local":
        yield str(tmp_path / "run")
        return
    yield "memory://test-metrics/run"
    memory = fsspec.filesystem("memory")
    if memory.exists("/test-metrics"):
        memory.rm("/test-metrics", recursive=True)


def log(run_dir: str, attempt: int, *rows: Mapping[str, object]) -> None:
    segment = MetricsLog(run_dir, attempt, print)
    for row in rows:
        segment.write(row)
    segment.file.close()


def test_each_attempt_writes_json_lines_into_a_segment_of_its_own(tmp_path: Path) -> None:
    log(str(tmp_path), 1, {"step": 1, "loss": 2.5}, {"step": 2, "loss": None})
    log(str(tmp_path), 12, {"step": 3, "loss": 2.0})
    folder = tmp_path / "metrics"
    assert sorted(p.name for p in folder.iterdir()) == ["attempt-00001.jsonl", "attempt-00012.jsonl"]
    lines = (folder / "attempt-00001.jsonl").read_text().splitlines()
    expected = [{"attempt": 1, "step": 1, "loss": 2.5}, {"attempt": 1, "step": 2, "loss": None}]
    assert [json.loads(line) for line in lines] == expected


def test_a_newer_attempt_replaces_what_older_ones_have_measured_beyond_its_first_step(run_dir: str) -> None:
    """Steps 30 and 40 of attempt 1 and 30 of attempt 2 were computed again, or never again: they led to no snapshot."""
    log(run_dir, 1, *({"step": s, "loss": 1.0 + s} for s in (10, 20, 30, 40)))
    log(run_dir, 3, {"step": 30, "loss": 3.3})
    log(run_dir, 2, {"step": 20, "loss": 2.2}, {"step": 25, "loss": 2.25}, {"step": 30, "loss": 2.3})
    assert read_metrics(run_dir) == [
        {"attempt": 1, "step": 10, "loss": 11.0},
        {"attempt": 2, "step": 20, "loss": 2.2},
        {"attempt": 2, "step": 25, "loss": 2.25},
        {"attempt": 3, "step": 30, "loss": 3.3},
    ]


def test_an_attempt_says_itself_from_which_step_it_goes_on(run_dir: str) -> None:
    """Its claim says that it started from step 12. A rewind measures nothing and cuts off."""
    for number, (start, steps) in enumerate(((0, (10, 20, 30)), (12, (20,))), 1):
        assert Attempt.claim(run_dir, start, "d", number - 1).number == number
        log(run_dir, number, *({"step": s, "loss": float(number)} for s in steps))
    assert [(r["attempt"], r["step"]) for r in read_metrics(run_dir)] == [(1, 10), (2, 20)]
    Attempt.claim(run_dir, 15, "d", 1, by=REWIND)
    assert [(r["attempt"], r["step"]) for r in read_metrics(run_dir)] == [(1, 10)]


def test_what_an_attempt_grew_from_counts_and_not_its_number(run_dir: str) -> None:
    """Attempt 2 went on from an older step and died; attempt 3 found what attempt 1 had left in a node's memory."""
    for number, (start, parent, steps) in enumerate(((0, 0, (10, 20, 30)), (12, 1, (20,)), (30, 1, (40,))), 1):
        Attempt.claim(run_dir, start, "d", parent)
        log(run_dir, number, *({"step": s, "loss": float(number)} for s in steps))
    assert [(r["attempt"], r["step"]) for r in read_metrics(run_dir)] == [(1, 10), (1, 20), (1, 30), (3, 40)]


def test_the_validation_loss_joins_its_step(run_dir: str) -> None:
    log(run_dir, 1, {"step": 10, "loss": 2.0}, {"step": 10, "val_loss": 2.1}, {"step": 15, "val_loss": 2.05})
    assert read_metrics(run_dir) == [
        {"attempt": 1, "step": 10, "loss": 2.0, "val_loss": 2.1},
        {"attempt": 1, "step": 15, "val_loss": 2.05},
    ]


def test_the_figures_of_two_attempts_are_never_mixed_in_one_step(run_dir: str) -> None:
    log(run_dir, 1, {"step": 10, "loss": 2.0, "world_size": 4}, {"step": 10, "val_loss": 2.1})
    log(run_dir, 2, {"step": 10, "loss": 2.0})
    assert read_metrics(run_dir) == [{"attempt": 2, "step": 10, "loss": 2.0}]


@pytest.mark.parametrize("cut", [1, 10, 25])
def test_a_line_that_a_killed_attempt_left_half_written_is_passed_over(tmp_path: Path, cut: int) -> None:
    log(str(tmp_path), 1, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.5})
    segment = tmp_path / "metrics" / "attempt-00001.jsonl"
    segment.write_bytes(segment.read_bytes()[:-cut])
    log(str(tmp_path), 2, {"step": 3, "loss": 1.0})
    expected = [1, 2, 3] if cut == 1 else [1, 3]  # without its newline only, the line is whole
    assert [row["step"] for row in read_metrics(str(tmp_path))] == expected


def test_a_local_line_is_there_at_once(tmp_path: Path) -> None:
    segment = MetricsLog(str(tmp_path), 1, print)
    segment.write({"step": 1})
    assert read_metrics(str(tmp_path)) == [{"attempt": 1, "step": 1}]
    segment.file.close()


def test_lines_of_a_remote_run_are_there_after_each_flush() -> None:
    run_dir = "memory://test-metrics/flushed"
    segment = MetricsLog(run_dir, 1, print)
    try:
        segment.write({"step": 1})
        assert read_metrics(run_dir) == []
        segment.file.flush()
        assert read_metrics(run_dir) == [{"attempt": 1, "step": 1}]
        segment.write({"step": 2})
        segment.file.flush()
        segment.write({"step": 3})
        assert [row["step"] for row in read_metrics(run_dir)] == [1, 2]
        segment.file.close()
        assert [row["step"] for row in read_metrics(run_dir)] == [1, 2, 3]
    finally:
        fsspec.filesystem("memory").rm("/test-metrics", recursive=True)


def test_a_run_that_never_was_has_no_metrics(run_dir: str) -> None:
    assert read_metrics(run_dir) == []
    assert newest_number(run_dir) == 0


def test_attempts_are_numbered_from_the_newest_claim_or_segment_on(run_dir: str) -> None:
    log(run_dir, 41, {"step": 1})
    assert Attempt.claim(run_dir, 0, None).number == 42  # it died before its first line
    assert Attempt.claim(run_dir, 0, None).number == 43
    log(run_dir, 99999, {"step": 1})
    assert Attempt.claim(run_dir, 0, None).number == 100000
    assert Attempt.claim(run_dir, 0, None).number == 100001


def test_files_that_are_no_segments_are_left_alone(tmp_path: Path) -> None:
    log(str(tmp_path), 7, {"step": 1})
    for name in ("attempt-00099.jsonl.tmp", "attempt-99.jsonl", "notes-00099.jsonl", "Xattempt-00099.jsonl"):
        (tmp_path / "metrics" / name).write_text('{"attempt": 99, "step": 1}\n')
    assert newest_number(str(tmp_path)) == 7
    assert read_metrics(str(tmp_path)) == [{"attempt": 7, "step": 1}]


def test_a_number_that_is_not_finite_is_null_as_json_has_no_word_for_it(tmp_path: Path) -> None:
    log(str(tmp_path), 1, {"step": 1, "val_loss": math.nan, "loss": math.inf})
    raw = (tmp_path / "metrics/attempt-00001.jsonl").read_text()
    assert raw == '{"attempt": 1, "step": 1, "val_loss": null, "loss": null}\n'


def test_lines_that_are_json_and_no_rows_are_passed_over(tmp_path: Path) -> None:
    log(str(tmp_path), 1, {"step": 1})
    with (tmp_path / "metrics/attempt-00001.jsonl").open("a") as f:
        f.write('[1]\n{"step": "2"}\n{"loss": 1}\n' + "[" * 100_000 + "\n")
    assert read_metrics(str(tmp_path)) == [{"attempt": 1, "step": 1}]


def test_the_console_line_says_where_the_run_is() -> None:
    done = StepDone(
        step=100,
        loss=2.34567,
        lr=0.001,
        grad_norm=0.8512,
        tokens_per_second=12345.6,
        step_seconds=0.2104,
        tokens_seen=1_638_400,
        seconds_left=399.76,
        peak_memory=2**29,
    )
    expected = (
        "step  100/2000  loss 2.3457  lr 1.00e-03  norm 0.85  12,346 tokens/s  210 ms/step  6 min 40 s left  "
        "1,638,400 tokens  0.50 GiB"
    )
    assert step_line(done, 2000) == expected
    assert step_line(replace(done, mfu=0.384), 2000) == f"{expected}  38.4% MFU"


def test_a_row_of_a_step_has_the_names_that_all_observers_use(tmp_path: Path) -> None:
    """The share of a peak that is not known is left out, and so is a step that is not logged."""
    metrics = MetricsLog(str(tmp_path), 1, print)
    for done in (StepDone(1, 2.0, 1.0, logged=False), StepDone(2, 2.0, 1.0), StepDone(3, 2.0, 1.0, mfu=0.5)):
        metrics.on(done)
    names = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", "world_size"}
    names |= {"attempt", "tokens_seen", "seconds_left", "peak_memory"}
    assert [row.keys() for row in read_metrics(str(tmp_path))] == [names, names | {"mfu"}]
