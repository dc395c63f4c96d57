"""Metrics for programs: JSON lines.

Each attempt writes a segment of its own, `<run.dir>/metrics/attempt-00001.jsonl`, since object stores cannot append and
two attempts may overlap. Readers put the segments together along the run's line.
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

UPLOAD_SECONDS = 15  # between two looks for lines that a bucket does not have yet


def read_metrics(run_dir: str) -> list[dict[str, Any]]:
    """The metrics of a run by step, as its newest attempt came about: its own, before those its parent's, and so on.

    So what an attempt measured beyond the snapshot that a newer one went on from is left out, and all that a rewind cut
    off. A line that a killed attempt left half written is passed over.
    """
    fs, _ = open_fs(run_dir, "run.dir")
    rows: dict[int, dict[str, Any]] = {}
    paths, claimed = segments(run_dir), records(run_dir)
    numbers = sorted(paths.keys() | claimed.keys())
    attempt, end = max(numbers, default=0), math.inf
    while attempt > 0:
        own = list[dict[str, Any]]()
        if attempt in paths:
            with place("run.dir", run_dir):
                own = list(_rows(fs.cat_file(paths[attempt])))
        older = max((n for n in numbers if n < attempt), default=0)
        first = min((row["step"] for row in own), default=end) - 1
        # An attempt of an earlier version has claimed nothing: it grew from the one before it.
        start, parent = (r.from_step, r.parent) if (r := claimed.get(attempt)) else (first, older)
        for row in own:  # a step's evaluation joins its loss
            if start < row["step"] <= end:
                rows[row["step"]] = rows.get(row["step"], {}) | row
        attempt, end = min(parent, attempt - 1), min(end, start)
    return [rows[step] for step in sorted(rows)]


def _rows(raw: bytes) -> list[dict[str, Any]]:
    rows = []
    for line in raw.decode(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
    return rows


class MetricsLog:
    """One attempt's segment. On a local disk each line is there at once; elsewhere within seconds, and after `flush`.

    A place that can't be written costs the run nothing: lines wait in memory and are tried again with the next ones, at
    each snapshot and at the end, and `say` tells it once until it works again.
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
        self.lines: list[str] = []  # of a local disk: those that it does not have yet
        self.stored = 0  # of those lines, in a bucket
        self.failing = False
        self._file: TextIO | None = None
        self._storing = threading.Lock()  # training's thread never waits for a bucket: it only adds lines
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
        """A number that is not finite becomes null: JSON has no other word for it."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.lines.append(json.dumps({"attempt": self.attempt, **finite}, allow_nan=False) + "\n")
        if is_local(self.fs):
            self.flush()

    def flush(self) -> None:
        """Bring to the store what it does not have yet. Says what goes wrong, and raises nothing."""
        with self._storing:
            try:
                with place("run.dir", self.run_dir):
                    self._append() if is_local(self.fs) else self._put()
            except Exception as error:  # whatever it is: in the uploading thread nobody else would hear of it
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
        # After a failure the disk may have half of a line.
        count = len(self.lines)
        text = ("\n" if self.failing else "") + "".join(self.lines[:count])
        try:
            self._file.write(text)
            self._file.flush()
        except OSError:
            broken, self._file = self._file, None
            with suppress(OSError):  # it tries to write the rest again
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
            with suppress(OSError):  # each line was flushed before
                self._file.close()
