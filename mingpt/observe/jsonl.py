"""Metrics as JSON lines.

Each attempt writes a file of its own, `<run.dir>/metrics/attempt-00001.jsonl`, since object stores cannot append and
two attempts may overlap. history/history.py combines the files along the run's lineage.
"""

import json
from collections.abc import Mapping
from typing import Any

from mingpt.cli.console import Say, complain, counted, finite
from mingpt.files.folder import Folder
from mingpt.observe.events import (
    AttemptEnded,
    AttemptFailed,
    Evaluated,
    Event,
    Sampled,
    SnapshotCommitted,
    StepDone,
    StepSkipped,
)
from mingpt.observe.runfile import RunFile


def rows_of(run_dir: str, name: str) -> list[dict[str, Any]]:
    """All rows of one attempt's file. Lines that are damaged are counted in a line on the console, and left out."""
    folder = Folder(run_dir)
    lines = (folder.read_or_skip(name) or b"").decode(errors="replace").split("\n")
    rows = [_row(line) for line in lines]
    # The last line is empty, or a killed attempt has written it in part: that is no damage.
    if damaged := sum(row is None for row in rows[:-1]):
        complain(f"{folder.path(name)}: {counted(damaged, 'damaged line')} left out")
    return [row for row in rows if row is not None]


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


class MetricsLog:
    """Writes one attempt's file: a line for each event that people plot."""

    def __init__(self, run_dir: str, attempt: int, say: Say) -> None:
        self.attempt = attempt
        self.file, self.ended = RunFile(run_dir, f"metrics/attempt-{attempt:05d}.jsonl", say), False

    def on(self, event: Event) -> None:
        match event:
            case StepSkipped():
                bad = {"microbatches": event.microbatches, "samples": event.samples, "spike": event.spike}
                self.write({"step": event.step, "loss": event.loss, "grad_norm": event.grad_norm, "skipped": bad})
            case StepDone(logged=True) | Evaluated():
                self.write({"step": event.step} | event.curves)
            case Sampled():
                self.write({"step": event.step, "sample": event.text})
            case SnapshotCommitted():
                self.file.flush()
            case AttemptEnded() | AttemptFailed():
                self.ended = True
                self.file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a line. A number that is not finite becomes null, since JSON has no NaN."""
        row = finite({"attempt": self.attempt, **row})
        self.file.append(f"{json.dumps(row, allow_nan=False)}\n".encode())
        if self.ended:  # a row of another observer that came late: nothing else would upload it
            self.file.flush()
