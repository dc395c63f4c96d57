"""The trace keeps each step's loss and norm with all their bits."""

from pathlib import Path
from uuid import uuid4

import pytest

from mingpt.observe import trace
from mingpt.observe.events import AttemptEnded, StepDone
from mingpt.observe.trace import Trace, read_trace

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize("bucket", [False, True])
def test_every_step_is_there_with_all_its_bits(tmp_path: Path, bucket: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are none, too."""
    monkeypatch.setattr(trace, "CHUNK", 3)
    run_dir = f"memory://{uuid4().hex}" if bucket else str(tmp_path)
    assert read_trace(run_dir) == {}
    for attempt, first, last in ((1, 1, 7), (2, 6, 9)):
        log = Trace(run_dir, attempt, print)
        for step in range(first, last + 1):
            log.on(StepDone(step, 1 / step if step < 9 else NAN, 0.1 * step if step < 9 else INFINITE))
        log.on(AttemptEnded(last, True, None))
    read = read_trace(run_dir)
    assert {attempt: rows["step"].tolist() for attempt, rows in read.items()} == {1: [*range(1, 8)], 2: [6, 7, 8, 9]}
    assert read[1]["loss"].tolist() == [1 / step for step in range(1, 8)]
    assert read[2]["norm"].tolist() == [*(0.1 * step for step in (6, 7, 8)), INFINITE]
    assert str(read[2]["loss"][3]) == "nan"
    if not bucket:  # a record takes 20 bytes; one that was cut off is left out, and so is another's file
        file = tmp_path / "trace/attempt-00002-000000006.bin"
        assert file.stat().st_size == 3 * 20
        file.write_bytes(file.read_bytes()[:-1])
        (tmp_path / "trace/notes.txt").write_text("mine")
        assert read_trace(run_dir)[2]["step"].tolist() == [6, 7, 9]
