"""What a run's directory says about the run, as one record. Its files may come from anybody: nothing is believed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from mingpt.config.configfile import LONGEST, NAME
from mingpt.errors import UserError
from mingpt.folder import Folder
from mingpt.observe.jsonl import read_metrics
from mingpt.observe.ledger import Account, Ledger, kept_until, ledger
from mingpt.observe.trace import Records, read_trace
from mingpt.redact import without_secrets
from mingpt.snapshot.attempts import REWIND, Record, records
from mingpt.snapshot.files import SNAPSHOTS
from mingpt.snapshot.find import run_dir_of
from mingpt.snapshot.forking import Parent, own_history, parent_of
from mingpt.snapshot.format import Manifest
from mingpt.snapshot.reader import manifest_or_none
from mingpt.snapshot.store import Store

Floats = npt.NDArray[np.float64]
MANIFESTS_TRIED = 3
UNKNOWN = math.nan


@dataclass(frozen=True)
class Curve:
    """Values by step, in its order. What is not finite is among them."""

    steps: Floats
    values: Floats

    @classmethod
    def of(cls, steps: Floats, values: Floats) -> "Curve":
        order = np.argsort(steps, kind="stable")
        return cls(steps[order].astype(float), values[order].astype(float))

    @property
    def last(self) -> float | None:
        return float(self.values[-1]) if len(self.values) else None


@dataclass(frozen=True)
class Run:
    """folder: the run's directory. url: the same for people, without secrets. rows: its metrics.

    attempts: with rewinds; of an older run, without a ledger, they hold what else is known. kept: the last step that
    the run kept, by attempt. parent: of a fork, what it was forked from.
    """

    folder: str
    url: str
    rows: list[dict[str, Any]]
    attempts: list[Account]
    kept: dict[int, int]
    loss: Curve
    ledger: Ledger | None
    manifest: Manifest | None
    snapshots: list[int]
    config: str
    parent: Parent | None
    claims: dict[int, Record]

    @property
    def name(self) -> str:
        return self.manifest.run if self.manifest else self.folder.rstrip("/").rpartition("/")[2]

    def curve(self, key: str) -> Curve:
        return _curve((row["step"], row[key]) for row in self.rows if key in row)

    @property
    def parameters(self) -> int:
        """Of the newest snapshot's model; 0 where there is none."""
        tensors = self.manifest.tensors.values() if self.manifest else ()
        return sum(math.prod(info.shape) for info in tensors if info.part.startswith("model"))

    @property
    def on_line(self) -> list[Account]:
        """The attempts of which the run kept steps."""
        return [a for a in self.attempts if self.kept.get(a.attempt, 0) > a.from_step]

    @property
    def last_step(self) -> int:
        kept = (self.kept[a.attempt] for a in self.on_line)
        return max([*kept, *self.snapshots[:1], *(int(s) for s in self.loss.steps[-1:])], default=0)


def read_run(url: str) -> Run:
    """Raises UserError if nothing of a run is there."""
    folder = run_dir_of(url)
    Folder(folder, "RUN").check()
    store, claimed = Store(f"{folder}/{SNAPSHOTS}", "RUN"), records(folder)
    rows = [row for row in read_metrics(folder) if 0 < row["step"] < 2**32 and type(row.get("attempt")) is int]
    if not (store.steps() or claimed or rows):
        raise UserError(
            f"{without_secrets(url)}: no run is there: check the spelling; give a run's directory, such as those that "
            f"`mingpt snapshots list FOLDER` shows in a folder of runs"
        )
    manifests = (manifest_or_none(store, step) for step in store.steps()[:MANIFESTS_TRIED])
    manifest = next((m for m in manifests if m), None)
    booked, trace = ledger(folder), read_trace(folder)
    older = _older(claimed, manifest, rows, booked.accounts)
    attempts = sorted([*older, *booked.accounts], key=lambda a: a.attempt)
    done = _done(attempts, rows, trace)
    if manifest and manifest.attempt in done:  # a copy has no trace, and perhaps no metrics
        done[manifest.attempt] = max(done[manifest.attempt], manifest.step)
    kept = kept_until(claimed, done)
    on_line = {
        a.attempt: part[(part["step"] > a.from_step) & (part["step"] <= kept[a.attempt])]
        for a in attempts
        if (part := trace.get(a.attempt)) is not None
    }

    # From the trace; of attempts without one from the metrics.
    own = _curve((row["step"], row["loss"]) for row in rows if "loss" in row and row["attempt"] not in on_line)
    loss = Curve.of(
        np.concatenate([own.steps, *(part["step"] for part in on_line.values())]),
        np.concatenate([own.values, *(part["loss"] for part in on_line.values())]),
    )

    return Run(
        folder=folder,
        url=without_secrets(url),
        rows=rows,
        attempts=[_ended(a, attempts[-1].attempt) for a in attempts],
        kept=kept,
        loss=loss,
        ledger=booked if booked.accounts else None,
        manifest=manifest,
        snapshots=store.steps(),
        config=_config(folder),
        parent=parent_of(manifest),
        claims=claimed,
    )


def forked_from(run: Run, runs: Sequence[Run]) -> Run | None:
    """The one among several runs that a run was forked from."""
    parent = run.parent
    if parent is None or parent.claim is None:
        return None
    claim = parent.attempt, parent.claim
    return next((r for r in runs if r is not run and claim in ((n, c.id) for n, c in r.claims.items())), None)


def _number(value: object) -> float:
    """NaN for what is no number: JSON lines hold null for a number that is not finite."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # JSON's integers have any length
        return math.inf


def _curve(points: Iterable[tuple[int, object]]) -> Curve:
    pairs = np.array([(step, _number(value)) for step, value in points], dtype=float).reshape(-1, 2)
    return Curve.of(pairs[:, 0], pairs[:, 1])


def _done(attempts: Sequence[Account], rows: Sequence[dict[str, Any]], trace: Mapping[int, Records]) -> dict[int, int]:
    """The last step that is known of each attempt. One that was killed has written its account some seconds before."""
    done = {a.attempt: a.step for a in attempts}
    logged = ((row["attempt"], row["step"]) for row in rows)
    for number, step in chain(logged, ((n, int(t["step"].max(initial=0))) for n, t in trace.items())):
        done[number] = max(done.get(number, 0), step)
    return done


def _ended(account: Account, newest: int) -> Account:
    without = "killed" if account.attempt < newest else "no end: still going on, or killed"
    return replace(account, end=without) if account.end is None else account


def _older(
    claimed: dict[int, Record], manifest: Manifest | None, rows: Sequence[dict[str, Any]], known: Sequence[Account]
) -> list[Account]:
    """What claims, the newest snapshot and the metrics tell of attempts without an account, and of rewinds."""
    history = {h["attempt"]: h for h in own_history(manifest) if type(h.get("attempt")) is int} if manifest else {}
    first, last = ({row["attempt"]: row for row in order} for order in (reversed(rows), rows))
    found = []
    for number in sorted({*claimed, *history, *last} - {a.attempt for a in known}):
        past, row = history.get(number, {}), last.get(number, {})
        numerics, world = past.get("numerics"), past.get("world_size", row.get("world_size"))
        start = claimed[number].from_step if number in claimed else first[number]["step"] - 1 if row else 0
        found.append(
            Account(
                attempt=number,
                from_step=start,
                step=max(start, row.get("step", 0)),
                world_size=world if type(world) is int else 0,
                device=str(numerics.get("device", "")) if isinstance(numerics, dict) else "",
                host="",
                started=_time(past.get("at")),
                until=UNKNOWN,
                seconds={},
                end=_rewind(claimed[number]) if number in claimed else "",
            )
        )
    return found


def _rewind(claim: Record) -> str:
    return "" if claim.by != REWIND else "undo" if claim.undoes else "rewind"


def _time(text: object) -> float:
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else UNKNOWN
    except (ValueError, OverflowError):
        return UNKNOWN


def _config(folder: str) -> str:
    """config.yaml, or "" where there is none, as in older runs."""
    raw = Folder(folder, "RUN").read(NAME, LONGEST) or b""
    return str(without_secrets(raw.decode(errors="replace")))
