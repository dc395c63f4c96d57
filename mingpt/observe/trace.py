"""Each step's loss and gradient norm with all their bits: what later tools compare runs by.

An attempt's trace is a row of files of CHUNK records, since a bucket's file is uploaded whole whenever it has grown:
`<run.dir>/trace/attempt-00001-000000001.bin`, named by attempt and first step. A million steps take 20 MB.
"""

import re
import struct
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mingpt.folder import Folder
from mingpt.observe.events import AttemptEnded, AttemptFailed, Event, StepDone
from mingpt.observe.runfile import RunFile

RECORD = np.dtype([("step", "<u4"), ("norm", "<f8"), ("loss", "<f8")])
PACK = struct.Struct("<Idd").pack
NAME = re.compile(r"attempt-([0-9]{5,})-([0-9]{9,})\.bin")
CHUNK = 1 << 15  # records: two thirds of a megabyte

Records = NDArray[np.void]  # of dtype RECORD


class Trace:
    """Writes one attempt's trace."""

    def __init__(self, run_dir: str, attempt: int, say: Callable[[str], None]) -> None:
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
            chunks.setdefault(int(match[1]), {})[int(match[2])] = _records(contents[name])
    return {attempt: np.concatenate([parts[n] for n in sorted(parts)]) for attempt, parts in sorted(chunks.items())}


def _records(raw: bytes) -> Records:
    return np.frombuffer(raw[: len(raw) // RECORD.itemsize * RECORD.itemsize], RECORD)
