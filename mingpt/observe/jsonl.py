"""Metrics as JSON lines.

Each attempt writes a file of its own, `<run.dir>/metrics/attempt-00001.jsonl`, since object stores cannot append and
two attempts may overlap. `read_metrics` combines the files along the run's lineage.
"""

import json
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from mingpt.observe.events import AttemptEnded, Evaluated, Event, SnapshotCommitted, StepDone, StepSkipped
from mingpt.snapshot.attempts import records, segments
from mingpt.storage import is_local, open_fs, place

UPLOAD_SECONDS = 15  # between two uploads of new lines to a bucket


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


def rows_of(run_dir: str, path: str) -> list[dict[str, Any]]:
    """All rows of one attempt's file."""
    fs, _ = open_fs(run_dir, "run.dir")
    with place("run.dir", run_dir):
        raw: bytes = fs.cat_file(path)
    rows = []
    for line in raw.decode(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


class MetricsLog:
    """Writes one attempt's file: to a local disk line by line, to a bucket every UPLOAD_SECONDS and at each snapshot.

    A failed write does not end the run: the lines stay in memory and are written with the next ones. It is reported
    once, and again when writing works.
    """

    def __init__(
        self,
        run_dir: str,
        attempt: int,
        say: Callable[[str], None],
        wants: Callable[[int], bool] = lambda step: True,
    ) -> None:
        self.attempt, self.run_dir, self.say, self.wants = attempt, run_dir, say, wants
        self.fs, root = open_fs(run_dir, "run.dir")
        self.path = f"{root.rstrip('/')}/metrics/attempt-{attempt:05d}.jsonl"
        self.lines: list[str] = []  # local: those not written yet; bucket: all, since each upload replaces the file
        self.stored = 0  # bucket: the number of lines uploaded
        self.failing = False
        self._file: TextIO | None = None
        self._storing = threading.Lock()  # held while writing; `write` to a bucket does not take it
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._upload, name="metrics", daemon=True)
        if not is_local(self.fs):
            self._thread.start()

    def on(self, event: Event) -> None:
        match event:
            case StepDone():
                self.write(asdict(event))
            case StepSkipped():
                bad = {"microbatches": event.microbatches, "samples": event.samples, "spike": event.spike}
                self.write({"step": event.step, "loss": event.loss, "grad_norm": event.grad_norm, "skipped": bad})
            case Evaluated():
                accuracy = {} if event.accuracy is None else {"val_accuracy": event.accuracy}
                self.write({"step": event.step, "val_loss": event.val_loss} | accuracy)
            case SnapshotCommitted():
                self.flush()
            case AttemptEnded():
                self.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a line. A number that is not finite becomes null, since JSON has no NaN."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.lines.append(json.dumps({"attempt": self.attempt, **finite}, allow_nan=False) + "\n")
        if is_local(self.fs):
            self.flush()

    def flush(self) -> None:
        """Write or upload the new lines. Reports an error, and raises none."""
        with self._storing:
            try:
                with place("run.dir", self.run_dir):
                    self._append() if is_local(self.fs) else self._put()
            except Exception as error:  # any: in the uploading thread nothing else would report it
                if not self.failing:
                    self.say(f"METRICS can't be written: {error}. The run goes on; they are tried again.")
                self.failing = True
                return
            if self.failing:
                self.say("metrics are written again")
            self.failing = False

    def _append(self) -> None:
        path = Path(self.path)
        if self._file is not None and not path.exists():
            self.say(f"WARNING: {path} was deleted while the run was writing it: what it held is lost")
            self._file.close()
            self._file = None
        if self._file is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a")
        # A failed write may have left part of a line.
        count = len(self.lines)
        text = ("\n" if self.failing else "") + "".join(self.lines[:count])
        try:
            self._file.write(text)
            self._file.flush()
        except OSError:
            broken, self._file = self._file, None
            with suppress(OSError):  # `close` tries to flush, and fails in the same way
                broken.close()
            raise
        del self.lines[:count]

    def _put(self) -> None:
        count = len(self.lines)
        if count > self.stored:
            self.fs.pipe_file(self.path, "".join(self.lines[:count]).encode())
            self.stored = count

    def _upload(self) -> None:
        while not self._closed.wait(UPLOAD_SECONDS):
            self.flush()

    def close(self) -> None:
        self._closed.set()
        self.flush()
        if self._file is not None:
            with suppress(OSError):  # each line has been flushed
                self._file.close()
