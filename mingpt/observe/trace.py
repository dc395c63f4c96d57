"""Each step's loss and gradient norm with all their bits: what later tools compare runs by.

An attempt's trace is a row of files of CHUNK records, since a bucket's file is uploaded whole whenever it has grown:
`<run.dir>/trace/attempt-00001-000000001.bin`, named by attempt and first step. A million steps take 20 MB.

Steps that an attempt before has computed, too, must have the same bits. Each attempt's metrics begin with a name for
all that its bits follow from, and attempts with the same name are compared.
"""

import json
import re
import struct
import threading
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mingpt.cli.console import Say
from mingpt.config.affecting import settings
from mingpt.config.schema import Config
from mingpt.files.folder import Folder
from mingpt.observe.events import AttemptEnded, AttemptFailed, BitsDiffer, Event, StepDone
from mingpt.observe.jsonl import rows_of
from mingpt.observe.runfile import RunFile
from mingpt.snapshot.attempts import Record, RunRecord, records, segments

RECORD = np.dtype([("step", "<u4"), ("norm", "<f8"), ("loss", "<f8")])
PACK = struct.Struct("<Idd").pack
NAME = re.compile(r"attempt-([0-9]{5,})-([0-9]{9,})\.bin")
CHUNK = 1 << 15  # records: two thirds of a megabyte

Records = NDArray[np.void]  # of dtype RECORD


class Trace:
    """Writes one attempt's trace."""

    def __init__(self, run_dir: str, attempt: int, say: Say) -> None:
        self.run_dir, self.attempt, self.say = run_dir, attempt, say
        self.file: RunFile | None = None
        self.records = 0  # in this file
        self.full: list[RunFile] = []  # the last ones before it, which a bucket may not have yet

    def on(self, event: Event) -> None:
        match event:
            case StepDone():
                if self.file is None or self.records == CHUNK:
                    self._next(event.step)
                assert self.file
                self.file.append(PACK(event.step, event.grad_norm, event.loss))
                self.records += 1
            case AttemptEnded() | AttemptFailed():
                for file in [*self.full, *filter(None, [self.file])]:
                    file.close()

    def _next(self, step: int) -> None:
        if self.file:
            self.file.finish()
            self.full = [*self.full, self.file][-2:]
        self.file = RunFile(self.run_dir, f"trace/attempt-{self.attempt:05d}-{step:09d}.bin", self.say, "trace")
        self.records = 0


def read_trace(run_dir: str) -> dict[int, Records]:
    """All records by attempt, by step. A record that a killed attempt has written in part is left out."""
    folder, chunks = Folder(run_dir), dict[int, dict[int, Records]]()
    files = folder.find("trace", NAME)
    contents = folder.read_all(files)
    for match, name, _ in files:
        if name in contents:
            whole = len(contents[name]) // RECORD.itemsize * RECORD.itemsize
            chunks.setdefault(int(match[1]), {})[int(match[2])] = np.frombuffer(contents[name][:whole], RECORD)
    return {attempt: np.concatenate([parts[n] for n in sorted(parts)]) for attempt, parts in sorted(chunks.items())}


def in_order(found: Records, claim: Record, ended: int = 0) -> tuple[Records, str]:
    """The records of an attempt's steps, one after the other; and what is wrong with the next one, "" if nothing.

    claim: the attempt's, which says where it began; without an id nobody knows, and its first record is right.
    ended: the last step of an attempt that has ended by itself; 0: it may have been killed, and lack its last steps.
    """
    steps, problem = found["step"], ""
    start = claim.from_step if claim.id or not len(found) else max(0, int(steps[0]) - 1)
    good = int(np.argmin(np.append(steps == np.arange(start + 1, start + 1 + len(found)), False)))
    due = start + good + 1
    if good < len(found):
        problem = f"in place of step {due:,} it has step {steps[good]:,}"
    elif due <= ended:
        problem = f"step {due:,} and those after it are missing"
    return found[:good], problem


FIELD = "equality"  # of a row of the metrics that has no step: the attempt's name
END_SECONDS = 15.0  # at the end of an attempt, for reading what those before have recorded


def equality(config: Config, record: RunRecord) -> str | None:
    """A name for what the attempt's bits follow from, from the run's beginning on. None: reduce=fast promises none."""
    if config.reduce != "exact":
        return None
    values, affecting = settings(record.provenance["config"])
    path = list[list[Any]]()
    for entry in record.provenance["history"]:
        world = entry.get("world_size") if config.batch.per_process_size is not None else None
        numerics = [entry.get("numerics"), world]
        if not path or entry.get("changes") or numerics != path[-1][2:]:
            path.append([entry.get("from_step"), entry.get("changes"), *numerics])
    dropped = sorted(r.dropped for n, r in records(config.run.dir).items() if n < record.attempt and r.dropped)
    all_of_it = [{key: values[key] for key in sorted(affecting)}, path, dropped]
    return sha256(json.dumps(all_of_it, sort_keys=True, default=str).encode()).hexdigest()[:16]


def name_of(run_dir: str, path: str) -> str | None:
    """The name in an attempt's metrics; None: its bits are compared with no other's."""
    names = (row.get(FIELD) for row in rows_of(run_dir, path))
    return next((name for name in names if isinstance(name, str)), None)


class SameBits:
    """Publishes BitsDiffer at the first step of this attempt that has other bits than in an attempt before.

    note: adds a row to this attempt's metrics. What the attempts before have recorded is read in a thread.
    """

    def __init__(
        self,
        config: Config,
        record: RunRecord,
        note: Callable[[Mapping[str, Any]], None],
        publish: Callable[[BitsDiffer], None],
        say: Say,
    ) -> None:
        self.config, self.record, self.note, self.publish, self.say = config, record, note, publish, say
        self._before: dict[int, tuple[int, float, float]] = {}  # by step: the attempt, its loss and norm
        self._new: list[StepDone] = []
        self._thread = threading.Thread(target=self._read, name="earlier attempts", daemon=True)
        self._thread.start()

    def on(self, event: Event) -> None:
        """Events of snapshots come in other threads, at any time: nothing is compared there."""
        match event:
            case StepDone():
                self._new.append(event)
                self._compare_new()
            case AttemptEnded() | AttemptFailed():
                self._thread.join(END_SECONDS)
                self._compare_new()

    def _compare_new(self) -> None:
        if not self._thread.is_alive():
            new, self._new = self._new, []
            for step in new:
                self._compare(step)

    def _compare(self, new: StepDone) -> None:
        if new.step not in self._before:
            return
        attempt, loss, norm = self._before[new.step]
        if repr((loss, norm)) != repr((new.loss, new.grad_norm)):  # equal also where both are NaN
            self._before = {}  # all later steps differ, too
            pairs = (loss, new.loss), (norm, new.grad_norm)
            self.publish(BitsDiffer(new.step, self.record.attempt, attempt, *pairs))

    def _read(self) -> None:
        try:
            name, run_dir = equality(self.config, self.record), self.config.run.dir
            if name is None:
                return
            self.note({FIELD: name})
            start = self.record.provenance["history"][-1]["from_step"]
            metrics, claims = segments(run_dir), records(run_dir)
            for attempt, found in read_trace(run_dir).items():
                good, _ = in_order(found, claims.get(attempt, Record()))
                again = good[good["step"] > start]
                if attempt >= self.record.attempt or not len(again) or attempt not in metrics:
                    continue
                if name_of(run_dir, metrics[attempt]) == name:
                    self._before |= {step: (attempt, loss, norm) for step, norm, loss in again.tolist()}
        except Exception as error:
            reason = str(error) or type(error).__name__
            self.say(f"the bits are not compared with those of the attempts before: {reason}")
