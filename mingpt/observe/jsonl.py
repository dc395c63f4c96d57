"""Metrics as JSON lines.

Each attempt writes a file of its own, `<run.dir>/metrics/attempt-00001.jsonl`, since object stores cannot append and
two attempts may overlap. `read_metrics` combines the files along the run's lineage.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from mingpt.folder import Folder
from mingpt.observe.events import (
    AttemptEnded,
    AttemptFailed,
    Evaluated,
    Event,
    SnapshotCommitted,
    StepDone,
    StepSkipped,
    TasksEvaluated,
)
from mingpt.observe.runfile import RunFile
from mingpt.snapshot.attempts import records, segments


def read_metrics(run_dir: str) -> list[dict[str, Any]]:
    """The metrics of a run by step: those of the newest attempt, before them those of its parent, and so on.

    Of a parent, only the steps up to the snapshot from which its child resumed; so steps that were computed again, or
    that a rewind removed, are left out. A line that a killed attempt has written in part is left out, too.
    """
    rows: dict[int, dict[str, Any]] = {}
    paths, claimed = segments(run_dir), records(run_dir)
    numbers = sorted(paths.keys() | claimed.keys())
    attempt, end = max(numbers, default=0), math.inf
    while attempt > 0:
        own = [r for r in rows_of(run_dir, paths[attempt]) if type(r.get("step")) is int] if attempt in paths else []
        older = max((n for n in numbers if n < attempt), default=0)
        first = min((row["step"] for row in own), default=end) - 1
        # An attempt of an earlier version has no claim: its parent is the attempt before it.
        start, parent = (r.from_step, r.parent) if (r := claimed.get(attempt)) else (first, older)
        for row in own:  # a step may have two rows: its training and its evaluation
            if start < row["step"] <= end:
                rows[row["step"]] = rows.get(row["step"], {}) | row
        attempt, end = min(parent, attempt - 1), min(end, start)
    return [rows[step] for step in sorted(rows)]


def rows_of(run_dir: str, name: str) -> list[dict[str, Any]]:
    """All rows of one attempt's file."""
    raw, rows = Folder(run_dir).read(name) or b"", []
    for line in raw.decode(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


class MetricsLog:
    """Writes one attempt's file: a line for each event that people plot."""

    def __init__(
        self,
        run_dir: str,
        attempt: int,
        say: Callable[[str], None],
        more: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """more: returns what each row of a step has besides the event, such as the GPUs' figures."""
        self.attempt, self.more = attempt, more
        self.file, self.ended = RunFile(run_dir, f"metrics/attempt-{attempt:05d}.jsonl", say), False

    def on(self, event: Event) -> None:
        match event:
            case StepDone(logged=True):
                self.write({"step": event.step} | event.curves | dict(self.more()))
            case StepSkipped():
                bad = {"microbatches": event.microbatches, "samples": event.samples, "spike": event.spike}
                self.write({"step": event.step, "loss": event.loss, "grad_norm": event.grad_norm, "skipped": bad})
            case Evaluated() | TasksEvaluated():
                self.write({"step": event.step} | event.curves)
            case SnapshotCommitted():
                self.file.flush()
            case AttemptEnded() | AttemptFailed():
                self.ended = True
                self.file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a line. A number that is not finite becomes null, since JSON has no NaN."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.file.append(f"{json.dumps({'attempt': self.attempt, **finite}, allow_nan=False)}\n".encode())
        if self.ended:  # a row of another observer that came late: nothing else would upload it
            self.file.flush()
