"""A run's past, read once: its attempts, the line that leads to the newest one, its snapshots, and what it recorded.

Replay, diff, log and report are views of it. A run's files may come from anybody, and are only read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from mingpt.compute.guard import Range, merged
from mingpt.config.configfile import NAME, read_config
from mingpt.errors import OF_ONE, UserError
from mingpt.files.folder import Folder
from mingpt.observe.jsonl import rows_of
from mingpt.observe.ledger import Account, accounts, kept_until
from mingpt.observe.trace import Records, in_order, read_trace
from mingpt.snapshot.attempts import NO_END, REWIND, Parent, Record, line_of, parent_of, records, segments
from mingpt.snapshot.elsewhere import look_elsewhere
from mingpt.snapshot.format import Manifest
from mingpt.snapshot.lineage import is_on, rewound
from mingpt.snapshot.reader import read_manifest, run_dir_of
from mingpt.snapshot.store import SNAPSHOTS, Store

Row = dict[str, Any]  # what a file tells of a step or an attempt, by name

NOTHING = "no run is there"


@dataclass(frozen=True)
class Stretch:
    """The steps `first` to `last` (NO_END: no end is known), which one attempt computed and the run kept.

    config: plain. history: of the attempts up to this one. numerics: their last fingerprint; empty if nothing tells.
    dropped: rollbacks between the attempt before it and this one.
    """

    attempt: int
    first: int
    last: int
    config: Mapping[str, Any]
    history: list[Row]
    dropped: tuple[Range, ...] = ()

    @property
    def entry(self) -> Row:
        return self.history[-1] if self.history else {}

    @property
    def numerics(self) -> Row:
        return numerics_of(self.entry)

    @property
    def world_size(self) -> int:
        found = self.entry.get("world_size")
        return found if type(found) is int else 1


@dataclass(frozen=True)
class Bits:
    """What an attempt has recorded of one step."""

    attempt: int
    loss: float
    grad_norm: float


class History:
    """folder: the run's directory. steps: of its snapshots, in order.

    given: the run's directory, its snapshots folder, or a step's folder. attempt: follow this one; None: the newest.
    snapshots: snapshot.dir, if the run has set one.
    """

    def __init__(self, given: str, attempt: int | None = None, snapshots: str | None = None) -> None:
        self.folder = run_dir_of(given)
        Folder(self.folder, "RUN").check()
        self.attempt = attempt
        self.store = Store(snapshots or f"{self.folder}/{SNAPSHOTS}", "--snapshots" if snapshots else "RUN")
        self.steps = sorted(self.store.steps())
        self.damaged = list[str]()  # of the manifests that were read: which ones are bad, and why
        self._manifests: dict[int, Manifest | None] = {}

    @classmethod
    def open(cls, url: str, attempt: int | None = None, snapshots: str | None = None) -> "History":
        """Raises UserError if nothing of a run is there, or no such attempt."""
        found = cls(url, attempt, snapshots)
        newest = max(found.steps, default=0 if found.claims else None)
        look_elsewhere(found.folder, newest)
        if newest is None:
            raise UserError(
                f"{found.folder}: {NOTHING}: check the spelling; give a run's directory, such as those that "
                f"`mingpt snapshots list FOLDER` shows in a folder of runs"
            )
        if attempt is not None and attempt not in found.claims:
            raise UserError(f"--attempt {attempt}: {found.folder} has the attempts {', '.join(map(str, found.claims))}")
        return found

    def manifest(self, step: int) -> Manifest | None:
        """That of a snapshot, or None if it is bad."""
        if step not in self._manifests:
            self._manifests[step] = None
            try:
                self._manifests[step] = read_manifest(self.store, step)
            except OF_ONE as problem:
                self.damaged.append(f"step {step}: DAMAGED: {problem}")
        return self._manifests[step]

    @cached_property
    def manifests(self) -> dict[int, Manifest]:
        """Those of all good snapshots, by step."""
        return {step: manifest for step in self.steps if (manifest := self.manifest(step))}

    @cached_property
    def newest(self) -> Manifest | None:
        """That of the newest good snapshot."""
        return next((manifest for step in reversed(self.steps) if (manifest := self.manifest(step))), None)

    def set_aside(self, overtaken: bool = False) -> list[Manifest]:
        """The snapshots that a rewind has set aside. overtaken: those of overtaken attempts, too."""
        folders = sorted(self.store.folders())
        return [m for step in folders for _, m in rewound(self.store, step, self.damaged.append, overtaken)]

    @cached_property
    def entries(self) -> dict[int, Row]:
        """What the newest snapshot's history says of each attempt, and of those of the runs that it was forked from."""
        told = self.newest.history if self.newest else []
        return {entry["attempt"]: entry for entry in told if type(entry.get("attempt")) is int}

    @cached_property
    def rows(self) -> dict[int, list[Row]]:
        """What each attempt has logged of steps."""
        found = dict[int, list[Row]]()
        for number, name in segments(self.folder).items():
            for row in rows_of(self.folder, name):
                if type(step := row.get("step")) is int and 0 < step < NO_END:
                    found.setdefault(number, []).append(row | {"attempt": number})
        return found

    @cached_property
    def _traces(self) -> tuple[dict[int, Records], dict[int, str]]:
        """By attempt, the records that are in order, and what is wrong with the next one, if anything is."""
        good, damage = dict[int, Records](), dict[int, str]()
        ended = {account.attempt: account.step for account in self.accounts if account.end}
        for number, found in read_trace(self.folder).items():
            good[number], problem = in_order(found, self.claims.get(number, Record()), ended.get(number, 0))
            if problem:
                damage[number] = f"the trace of attempt {number} is damaged: {problem}"
        return good, damage

    @property
    def trace(self) -> dict[int, Records]:
        """By attempt, the record of each of its steps; of a damaged trace those before the damage."""
        return self._traces[0]

    @property
    def trace_damage(self) -> dict[int, str]:
        """By attempt, the first step that its trace should have recorded and has not."""
        return self._traces[1]

    @cached_property
    def accounts(self) -> list[Account]:
        return accounts(self.folder)

    @cached_property
    def claims(self) -> dict[int, Record]:
        """What each attempt has claimed; of one without a claim, what the newest snapshot or its metrics tell."""
        found, before = dict[int, Record](), 0
        for number, entry in self.entries.items():
            if number > before:
                start = entry.get("from_step")
                found[number] = Record(number, from_step=start if type(start) is int else 0, parent=before)
                before = number
        found |= records(self.folder)
        for number in sorted(segments(self.folder).keys() - found.keys()):
            if rows := self.rows.get(number):
                start, parent = min(row["step"] for row in rows) - 1, max((n for n in found if n < number), default=0)
                found[number] = Record(number, from_step=start, parent=parent)
        return dict(sorted(found.items()))

    @cached_property
    def parent(self) -> Parent | None:
        """What this run was forked from; None if it is no fork."""
        return parent_of(self.newest)

    def is_fork_of(self, other: "History") -> bool:
        parent = self.parent
        return parent is not None and any((parent.attempt, parent.claim) == (n, c.id) for n, c in other.claims.items())

    @cached_property
    def own(self) -> dict[int, Record]:
        """The claims without those of the runs that it was forked from, and of the fork's first snapshot."""
        first = self.parent.attempt + 2 if self.parent else 1
        return {number: claim for number, claim in self.claims.items() if number >= first}

    @cached_property
    def line(self) -> dict[int, tuple[int, int]]:
        """See `line_of`: the attempt that is followed, and those that lead to it."""
        return line_of(self.claims, self.attempt)

    @cached_property
    def kept(self) -> dict[int, int]:
        """The last step that the run kept, by attempt. One that was killed has written its account seconds before."""
        done = {number: claim.from_step for number, claim in self.own.items()}
        newest = [(self.newest.attempt, self.newest.step)] if self.newest else []  # of a copy nothing else tells
        known = chain(
            ((account.attempt, account.step) for account in self.accounts),
            ((number, row["step"]) for number, rows in self.rows.items() for row in rows),
            ((number, int(found["step"].max(initial=0))) for number, found in self.trace.items()),
            newest,
        )
        for number, step in known:
            done[number] = max(done.get(number, 0), step)
        return kept_until(self.claims, done)

    @cached_property
    def kept_trace(self) -> dict[int, Records]:
        """By attempt, the bits of the steps that the run kept, as they were recorded."""
        return {
            number: found[(found["step"] > start) & (found["step"] <= end)]
            for number, (start, end) in self.line.items()
            if (found := self.trace.get(number)) is not None
        }

    @cached_property
    def metrics(self) -> list[Row]:
        """What was logged of the steps that the run kept, by step."""
        merged = dict[int, Row]()
        for number, (start, end) in self.line.items():
            for row in self.rows.get(number, ()):  # a step may have two: its training and its evaluation
                if start < (step := row["step"]) <= end:
                    merged[step] = merged.get(step, {}) | row
        return [merged[step] for step in sorted(merged)]

    def last_of(self, key: str) -> Any:
        """The last value of a curve, such as val_loss."""
        return next((row[key] for row in reversed(self.metrics) if key in row), None)

    def best_val_loss(self, step: int) -> float | None:
        """The lowest that the run had measured up to `step`, as its metrics say."""
        losses = (row["val_loss"] for row in self.validations(step))
        return min((loss for loss in losses if isinstance(loss, float)), default=None)

    def validations(self, step: int = NO_END) -> list[Row]:
        """The metrics of evaluations up to `step`, without those on other parts of the split than the last of them."""
        found = [row for row in self.metrics if row["step"] <= step and "val_loss" in row]
        return [row for row in found if _validated_on(row) == _validated_on(found[-1])]

    @property
    def validated_on(self) -> tuple[float | None, float | None]:
        """What the last validation loss was measured on: tokens, and their share of the split. None: not recorded."""
        return _validated_on(next(reversed(self.validations()), {}))

    def bases(self, step: int) -> Iterator[int]:
        """The snapshots from which `step` can be computed, newest first; each may turn out to be damaged.

        They are of the attempts that are followed.
        """
        for s in reversed(self.steps):
            if s <= step and (manifest := self.manifest(s)) and is_on(self.line, manifest):
                yield s

    @cached_property
    def stretches(self) -> list[Stretch]:
        """Raises UserError if there is none."""
        trained = [
            (number, start + 1, end)
            for number, (start, end) in reversed(self.line.items())
            if number in self.claims and self.claims[number].by != REWIND and end > start
        ]
        if not trained:
            raise UserError(f"{self.folder}: nothing tells of an attempt that has trained there: give another run")
        before = [0, *(number for number, *_ in trained)]
        return [self._stretch(*part, earlier) for earlier, part in zip(before, trained, strict=False)]

    def stretch(self, step: int) -> Stretch:
        """The one that `step` is in; of steps after the last one, the last."""
        return next(s for s in reversed(self.stretches) if s.first <= step)

    def bits(self, step: int) -> Bits | None:
        """What the attempt that computed `step` has recorded of it; None without a record."""
        for number, found in self.kept_trace.items():
            if len(row := found[found["step"] == step]):
                return Bits(number, float(row[-1]["loss"]), float(row[-1]["norm"]))
        return None

    def check_step(self, step: int) -> None:
        """Raise UserError if the run has not come to `step`, as far as is known."""
        first, last = self.stretches[0].first, self.stretches[-1]
        recorded = (int(found["step"].max(initial=0)) for found in self.kept_trace.values())
        end = last.first - 1 if last.last == NO_END else last.last
        done = max(end, next(self.bases(NO_END), 0), *recorded)
        if first <= step <= done:
            return
        others = [number for number, found in self.trace.items() if (found["step"] == step).any()]
        cure = (
            f"attempt {others[-1]} has computed it: give --attempt {others[-1]}"
            if others
            else f"give {'an earlier' if step > done else 'a later'} one"
        )
        raise UserError(f"step {step}: {self.folder} has the steps {first} to {done}: {cure}")

    def _stretch(self, number: int, first: int, last: int, before: int) -> Stretch:
        between = range(before + 1, number) if before else range(0)
        dropped = [r.dropped for n, r in self.claims.items() if n in between and r.dropped]
        config, history = self._known_of(number, first)
        return Stretch(number, first, last, config, history, merged(dropped))

    def _known_of(self, attempt: int, first: int) -> tuple[Mapping[str, Any], list[Row]]:
        """An attempt's config and history: from a snapshot of its own or of a later one, or from config.yaml."""
        for step in sorted(self.steps, key=lambda s: (s < first, abs(s - first))):
            manifest = self.manifest(step)
            numbers = [h.get("attempt") for h in manifest.history] if manifest else []
            if manifest and attempt in numbers:
                at = numbers.index(attempt) + 1
                return _without(manifest.config, manifest.history[at:]), manifest.history[:at]
        if attempt != max(n for n, r in self.claims.items() if r.by != REWIND):
            raise UserError(
                f"{self.folder}: attempt {attempt}, which computed step {first}, has left no snapshot, and no later "
                f"one goes on from it: its config is not known; choose a step of another attempt"
            )
        config = read_config(self.folder)
        if config is None:
            raise UserError(f"{self.folder}: neither a snapshot nor {NAME} tells the config of attempt {attempt}")
        return config, []


def numerics_of(entry: Mapping[str, Any]) -> Row:
    """The fingerprint of an attempt, from its entry in a snapshot's history; empty if there is none."""
    found = entry.get("numerics")
    return found if isinstance(found, dict) else {}


def _validated_on(row: Mapping[str, Any]) -> tuple[float | None, float | None]:
    tokens, share = (v if isinstance(v := row.get(key), float) else None for key in ("val_tokens", "val_share"))
    return tokens, share


def read_metrics(run_dir: str) -> list[dict[str, Any]]:
    """The metrics of a run by step: those of the newest attempt, before them those of its parent, and so on.

    Of a parent, only the steps up to the snapshot from which its child resumed; so steps that were computed again, or
    that a rewind removed, are left out. A line that a killed attempt has written in part is left out, too.
    """
    return History(run_dir).metrics


def _without(config: Mapping[str, Any], later: list[Row]) -> Mapping[str, Any]:
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
