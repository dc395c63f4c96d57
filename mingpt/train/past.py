"""What a run's directory tells of each past step: which attempt computed it, from which config, with which bits.

Its files may come from anybody, and are only read.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mingpt.compute.guard import Range, merged
from mingpt.config.configfile import NAME, read_config
from mingpt.errors import UserError
from mingpt.folder import Folder
from mingpt.observe.jsonl import read_metrics
from mingpt.observe.trace import Records, read_trace
from mingpt.redact import without_secrets
from mingpt.snapshot.attempts import REWIND, Record, line_of, records
from mingpt.snapshot.files import SNAPSHOTS
from mingpt.snapshot.find import run_dir_of
from mingpt.snapshot.format import Manifest
from mingpt.snapshot.reader import manifest_or_none
from mingpt.snapshot.store import Store


@dataclass(frozen=True)
class Stretch:
    """The steps `first` to `last` (None: no end is known), which one attempt computed and the run kept.

    config: plain. history: of the attempts up to this one. numerics: their last fingerprint; empty if nothing tells.
    dropped: rollbacks between the attempt before it and this one.
    """

    attempt: int
    first: int
    last: int | None
    config: Mapping[str, Any]
    history: list[dict[str, Any]]
    dropped: tuple[Range, ...] = ()

    @property
    def numerics(self) -> dict[str, Any]:
        found = self.history[-1].get("numerics") if self.history else None
        return found if isinstance(found, dict) else {}

    @property
    def world_size(self) -> int:
        found = self.history[-1].get("world_size") if self.history else None
        return found if type(found) is int else 1


@dataclass(frozen=True)
class Bits:
    """Of a step, as an attempt has recorded them."""

    attempt: int
    loss: float
    grad_norm: float


class Past:
    """A run that is looked at. attempt: follow this one; None: the newest.

    url: the run's directory, its snapshots folder, or a step's folder. snapshots: snapshot.dir, if the run has set one.
    """

    def __init__(self, url: str, attempt: int | None = None, snapshots: str | None = None) -> None:
        self.folder = run_dir_of(url)
        Folder(self.folder, "RUN").check()
        self.url = without_secrets(self.folder)
        self.store = Store(snapshots or f"{self.folder}/{SNAPSHOTS}", "--snapshots" if snapshots else "RUN")
        self.steps = sorted(self.store.steps())
        self._manifests: dict[int, Manifest | None] = {}
        newest = next((m for step in reversed(self.steps) if (m := self.manifest(step))), None)
        self.claims = _of_history(newest) | records(self.folder)
        if not self.claims:
            raise UserError(
                f"{self.url}: no run is there: check the spelling; give a run's directory, and --snapshots if the run "
                f"has set snapshot.dir"
            )
        if attempt is not None and attempt not in self.claims:
            raise UserError(f"--attempt {attempt}: {self.url} has the attempts {', '.join(map(str, self.claims))}")
        self.line = _line(self.claims, attempt)
        if not self.line:
            raise UserError(f"{self.url}: nothing tells of an attempt that has trained there: give another run")

    def manifest(self, step: int) -> Manifest | None:
        """That of a snapshot, or None if it is bad."""
        if step not in self._manifests:
            self._manifests[step] = manifest_or_none(self.store, step)
        return self._manifests[step]

    @cached_property
    def trace(self) -> dict[int, Records]:
        return read_trace(self.folder)

    @cached_property
    def stretches(self) -> list[Stretch]:
        before = [0, *(number for number, *_ in self.line)]
        return [self._stretch(*part, earlier) for earlier, part in zip(before, self.line, strict=False)]

    def stretch(self, step: int) -> Stretch:
        """The one that `step` is in; of steps after the last one, the last."""
        return next(s for s in reversed(self.stretches) if s.first <= step)

    def bits(self, step: int) -> Bits | None:
        """As the attempt that computed `step` has recorded them; None without a record."""
        number, _, last = next(part for part in reversed(self.line) if part[1] <= step)
        found = self.trace.get(number)
        if found is None or (last is not None and step > last):
            return None
        row = found[found["step"] == step]
        return Bits(number, float(row[-1]["loss"]), float(row[-1]["norm"])) if len(row) else None

    def check_step(self, step: int) -> None:
        """Raise UserError if the run has not come to `step`, as far as is known."""
        number, first, last = self.line[-1]
        done = max([last or first - 1, *(s for s in self.steps if self.is_on_line(s))])
        done = max(done, int(self.trace[number]["step"].max(initial=0)) if number in self.trace and last is None else 0)
        if self.line[0][1] <= step <= done:
            return
        others = [n for n, trace in self.trace.items() if (trace["step"] == step).any()]
        cure = (
            f"attempt {others[-1]} has computed it: give --attempt {others[-1]}"
            if others
            else f"give {'an earlier' if step > done else 'a later'} one"
        )
        raise UserError(f"step {step}: {self.url} has the steps {self.line[0][1]} to {done}: {cure}")

    def is_on_line(self, step: int) -> bool:
        """Whether the snapshot of this step belongs to the attempts that are followed."""
        manifest = self.manifest(step)
        ends = {number: last for number, _, last in self.line}
        if manifest is None:
            return False
        number = manifest.attempt
        while number not in ends:  # a fork's first snapshot is numbered after the attempt that it was copied from
            record = self.claims.get(number)
            if record is None or record.from_step != step or record.parent >= number:
                return False
            number = record.parent
        end = ends[number]
        return end is None or step <= end

    def bases(self, step: int) -> Iterator[int]:
        """The snapshots from which `step` can be computed, newest first; each may turn out to be damaged."""
        yield from (s for s in reversed(self.steps) if s <= step and self.is_on_line(s))

    def best_val_loss(self, step: int) -> float | None:
        """The lowest that the run had measured up to `step`, as its metrics say."""
        ends = {number: (first, last or math.inf) for number, first, last in self.line}
        losses = [
            row["val_loss"]
            for row in read_metrics(self.folder)
            if isinstance(row.get("val_loss"), float) and row["step"] <= step
            if (found := ends.get(row.get("attempt", 0))) and found[0] <= row["step"] <= found[1]
        ]
        return min(losses, default=None)

    def _stretch(self, number: int, first: int, last: int | None, before: int) -> Stretch:
        between = range(before + 1, number) if before else range(0)
        dropped = [r.dropped for n, r in self.claims.items() if n in between and r.dropped]
        config, history = self._known_of(number, first)
        return Stretch(number, first, last, config, history, merged(dropped))

    def _known_of(self, attempt: int, first: int) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
        """An attempt's config and history: from a snapshot of its own or of a later one, or from config.yaml."""
        for step in sorted(self.steps, key=lambda s: (s < first, abs(s - first))):
            manifest = self.manifest(step)
            numbers = [h.get("attempt") for h in manifest.history] if manifest else []
            if manifest and attempt in numbers:
                at = numbers.index(attempt) + 1
                return _without(manifest.config, manifest.history[at:]), manifest.history[:at]
        if attempt != max(n for n, r in self.claims.items() if r.by != REWIND):
            raise UserError(
                f"{self.url}: attempt {attempt}, which computed step {first}, has left no snapshot, and no later one "
                f"goes on from it: its config is not known; choose a step of another attempt"
            )
        config = read_config(self.folder)
        if config is None:
            raise UserError(f"{self.url}: neither a snapshot nor {NAME} tells the config of attempt {attempt}")
        return config, []


def _line(claims: Mapping[int, Record], attempt: int | None) -> list[tuple[int, int, int | None]]:
    """(attempt, its first step, the last one that was kept of it) of an attempt and those that it goes back to."""
    found = [
        (number, start + 1, end)
        for number, (start, end) in line_of(claims, attempt).items()
        if number in claims and claims[number].by != REWIND and (end is None or end > start)
    ]
    return found[::-1]


def _of_history(manifest: Manifest | None) -> dict[int, Record]:
    """The attempts that led to a snapshot, as claims: of a copied run, nothing else tells them."""
    out, parent = dict[int, Record](), 0
    for entry in manifest.history if manifest else []:
        number, start = entry.get("attempt"), entry.get("from_step")
        if type(number) is int and type(start) is int and number > parent:
            out[number] = Record(number, from_step=start, parent=parent)
            parent = number
    return out


def _without(config: Mapping[str, Any], later: list[dict[str, Any]]) -> Mapping[str, Any]:
    """The config as it was before the changes of later attempts."""
    out: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in config.items()}
    for entry in reversed(later):
        changes = entry.get("changes")
        for key, change in changes.items() if isinstance(changes, dict) else ():
            section, _, name = key.rpartition(".")
            holder = out.get(section) if section else out
            if isinstance(holder, dict) and isinstance(change, list) and change and key != "data.sha256":
                holder[name] = change[0]
    return out
