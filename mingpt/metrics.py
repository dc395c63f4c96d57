"""Metrics for programs (JSON lines) and for people (one console line).

Each attempt writes a segment of its own, `<run.dir>/metrics/attempt-00001.jsonl`, since object stores cannot append and
two attempts may overlap. Readers merge the segments by step: the newest attempt that reached a step has the word.
"""

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from mingpt.console import complain
from mingpt.errors import Mistake, Unavailable
from mingpt.plainfile import check_all_plain
from mingpt.redact import without_secrets
from mingpt.storage import is_local, open_fs, place

SEGMENT = re.compile(r"attempt-([0-9]{5})\.jsonl")
VISIBLE_SECONDS = 10  # NFS clients remember for a few seconds that a file was not there


def _segment(root: str, attempt: int) -> str:
    return f"{root.rstrip('/')}/metrics/attempt-{attempt:05d}.jsonl"


def _segments(run_dir: str) -> list[tuple[int, str]]:
    """(attempt, path) of each segment, oldest first."""
    fs, root = open_fs(run_dir, "run.dir")
    fs.invalidate_cache()
    folder = f"{root.rstrip('/')}/metrics"
    with place("run.dir", run_dir):
        try:
            if is_local(fs):
                check_all_plain(folder, "run.dir")
            paths = fs.ls(folder, detail=False)
        except FileNotFoundError:
            return []
    return sorted((int(m[1]), p) for p in paths if (m := SEGMENT.fullmatch(Path(p).name)))


def next_attempt(run_dir: str) -> int:
    """The number of a new attempt: one more than that of the newest segment."""
    return max((attempt for attempt, _ in _segments(run_dir)), default=0) + 1


def check_newest_attempt(run_dir: str, attempt: int) -> None:
    """Raise Mistake if a newer attempt has started: the older one must not go on beside it."""
    newest = next_attempt(run_dir) - 1
    if newest > attempt:
        raise Mistake(
            f"run.dir={without_secrets(run_dir)}: attempt {newest} has started while this one, attempt {attempt}, was "
            f"still training: this one ends here, and the newer one goes on; two runs need two places"
        )


def read_metrics(run_dir: str) -> list[dict[str, Any]]:
    """The merged metrics of a run by step. A line that a killed attempt left half written is passed over."""
    fs, _ = open_fs(run_dir, "run.dir")
    rows: dict[int, dict[str, Any]] = {}
    for attempt, path in _segments(run_dir):
        with place("run.dir", run_dir):
            raw: bytes = fs.cat_file(path)
        for line in raw.decode(errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            # A newer attempt replaces an older one's line; within an attempt, a step's evaluation joins its loss.
            old = rows.get(row["step"], {})
            rows[row["step"]] = (old if old.get("attempt") == attempt else {}) | row
    return [rows[step] for step in sorted(rows)]


def segment_is_visible(run_dir: str, attempt: int) -> bool:
    """Whether this process sees the segment that the speaking process has just made, at the latest after some time."""
    fs, root = open_fs(run_dir, "run.dir")
    deadline = time.monotonic() + VISIBLE_SECONDS
    while True:
        fs.invalidate_cache()
        with place("run.dir", run_dir):
            if fs.exists(_segment(root, attempt)):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


class MetricsLog:
    """One attempt's segment. On a local disk each line is there at once; elsewhere, after each `flush`."""

    def __init__(self, run_dir: str, attempt: int) -> None:
        self.attempt, self.run_dir = attempt, run_dir
        self.fs, root = open_fs(run_dir, "run.dir")
        self.path = _segment(root, attempt)
        self.lines: list[str] = []
        self.stored = 0  # of those lines
        self.file: TextIO | None = None
        with place("run.dir", run_dir):
            if is_local(self.fs):
                Path(self.path).parent.mkdir(parents=True, exist_ok=True)
                try:
                    self.file = Path(self.path).open("x", buffering=1)  # noqa: SIM115 (closed by `close`)
                except FileExistsError as error:  # nothing for the user to fix: the next attempt takes the next number
                    raise Unavailable(
                        f"another attempt has started at the same time: {self.path} exists: try again"
                    ) from error
            else:
                self.fs.pipe_file(self.path, b"")

    def write(self, row: Mapping[str, Any]) -> None:
        line = json.dumps({"attempt": self.attempt, **row}) + "\n"
        if not self.file:
            self.lines.append(line)
            return
        with place("run.dir", self.run_dir):
            self.file.write(line)

    def flush(self) -> None:
        if self.file and not Path(self.path).exists():
            complain(f"WARNING: {self.path} was deleted while the run was writing it: what it held is lost")
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            self.file = Path(self.path).open("a", buffering=1)  # noqa: SIM115
        if not self.file and (count := len(self.lines)) > self.stored:  # another thread may be adding to them
            with place("run.dir", self.run_dir):
                self.fs.pipe_file(self.path, "".join(self.lines[:count]).encode())
            self.stored = count

    def close(self) -> None:
        self.flush()
        if self.file:
            self.file.close()


def console_line(row: Mapping[str, Any], max_steps: int) -> str:
    """`step 100/2000  loss 2.3456  lr 1.00e-03  norm 0.85  12,345 tokens/s  210 ms/step`."""
    return (
        f"step {row['step']:>{len(str(max_steps))}}/{max_steps}  loss {row['loss']:.4f}  lr {row['lr']:.2e}  "
        f"norm {row['grad_norm']:.2f}  {row['tokens_per_second']:,.0f} tokens/s  "
        f"{row['step_seconds'] * 1e3:.0f} ms/step"
    )
