"""What a report shows of a run, from its history. Its files may come from anybody: nothing is believed."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from mingpt.compute.optimizer import batch_factor, schedule_factor
from mingpt.config.configfile import LONGEST, NAME, read_config
from mingpt.config.keys import declared, filled
from mingpt.config.schema import Batch, Optimizer, Schedule
from mingpt.errors import UserError
from mingpt.files.folder import Folder
from mingpt.history.history import History, Stretch, numerics_of
from mingpt.observe.ledger import Account, Ledger, added_up
from mingpt.snapshot.attempts import REWIND, runs_here

Floats = npt.NDArray[np.float64]
UNKNOWN = math.nan
LONGEST_STEP = 1e6  # seconds; more is no step
RATES = 4000  # steps of which the learning rate is computed: all of them, unless an attempt has more


@dataclass(frozen=True)
class Curve:
    """Values by step, in its order; of two for one step the first. What is not finite is among them."""

    steps: Floats
    values: Floats

    @classmethod
    def of(cls, steps: Floats, values: Floats) -> "Curve":
        steps, first = np.unique(steps, return_index=True)
        return cls(steps.astype(float), values[first].astype(float))

    def from_zero_at(self, step: int) -> "Curve":
        """With a first point, 0 at this step; empty if it has no other."""
        return Curve.of(np.append(self.steps, step), np.append(self.values, 0)) if len(self.steps) else self


class Run:
    """A run as a report shows it. past: its history. manifest: of its newest snapshot. kept: see History."""

    def __init__(self, url: str) -> None:
        """Raises UserError if nothing of a run is there."""
        self.past = History.open(url)
        self.manifest, self.kept = self.past.newest, self.past.kept

    @property
    def name(self) -> str:
        return self.manifest.run if self.manifest else self.past.folder.rstrip("/").rpartition("/")[2]

    @property
    def disk(self) -> str:
        """The host whose disk alone has the run, as the newest snapshot says; "" if there is none."""
        return str(next(reversed(self.past.entries.values()), {}).get("disk", ""))

    @cached_property
    def attempts(self) -> list[Account]:
        """With rewinds; of those without an account, they hold what else is known."""
        known = {account.attempt: account for account in self.past.accounts}
        found = [known.get(number) or self._older(number) for number in sorted({*self.past.own, *known})]
        return [replace(a, end=self._end(a, found[-1]) if a.end is None else a.end) for a in found]

    @cached_property
    def on_line(self) -> list[Account]:
        """The attempts of which the run kept steps."""
        return [a for a in self.attempts if self.kept[a.attempt] > a.from_step]

    @cached_property
    def ledger(self) -> Ledger | None:
        return added_up(self.past.accounts, self.past.claims) if self.past.accounts else None

    @cached_property
    def loss(self) -> Curve:
        return self._of_each_step("loss", "loss")

    @cached_property
    def norm(self) -> Curve:
        return self._of_each_step("norm", "grad_norm")

    def _of_each_step(self, field: str, key: str) -> Curve:
        """From the trace; of steps that it has not recorded from the metrics."""
        traced, logged = self.past.kept_trace.values(), self.curve(key)
        return Curve.of(
            np.concatenate([*(part["step"] for part in traced), logged.steps]),
            np.concatenate([*(part[field] for part in traced), logged.values]),
        )

    @property
    def lr(self) -> Curve:
        """Of each step, from its config; as it was logged where that does not tell, as with a schedule of one's own."""
        try:
            rates = [_rates(stretch, self.last_step) for stretch in self.past.stretches]
        except (UserError, ValidationError, ArithmeticError, KeyError, TypeError):  # a stranger's config may be anything
            rates = [None]
        known = [rate for rate in rates if rate is not None]
        if len(known) < len(rates):
            return self.curve("lr")
        return Curve.of(*(np.concatenate(parts) for parts in zip(*known, strict=True)))

    @property
    def tokens(self) -> Curve:
        """Seen by the run up to a step, where that was logged."""
        logged = self.curve("tokens_seen")
        return logged if self.past.parent else logged.from_zero_at(0)

    @cached_property
    def hours(self) -> Curve:
        """Of training up to a step: without start-ups, evaluations and snapshots. A fork's begin where it does."""
        pace = self.curve("step_seconds").from_zero_at(self.past.parent.step if self.past.parent else 0)
        seconds = np.clip(np.nan_to_num(pace.values), 0, LONGEST_STEP)
        spent = seconds * np.diff(pace.steps, prepend=pace.steps[:1])
        return Curve(pace.steps, np.cumsum(spent) / 3600)

    @cached_property
    def marks(self) -> list[tuple[int, str, str]]:
        """What happened to the run: the step, what kind of thing, and a sentence."""
        found = list[tuple[int, str, str]]()
        for a in self.attempts:
            claim = self.past.claims.get(a.attempt)
            if claim and claim.dropped:
                first, end = claim.dropped
                words = f"went back to step {a.from_step:,}, and left out batches {first:,} to {end - 1:,}"
                found.append((a.from_step, "rollback", words))
            elif a.end and a.end not in ("finished", "running"):
                kind, step = a.end.partition(":")[0], self.kept[a.attempt]
                found.append((step, kind, f"attempt {a.attempt}: {a.end}, step {step:,}"))
        for row in self.past.metrics:
            if isinstance(skipped := row.get("skipped"), dict):
                why = "a spike" if skipped.get("spike") else "not finite"
                found.append((row["step"], "skipped", f"step {row['step']:,} was skipped: {why}"))
        return sorted(found)

    def curve(self, key: str) -> Curve:
        return _curve((row["step"], row[key]) for row in self.past.metrics if key in row)

    @property
    def comparable(self) -> Curve:
        """The validation losses that were measured on what the last one was."""
        return _curve((row["step"], row["val_loss"]) for row in self.past.validations())

    @property
    def parameters(self) -> int:
        """Of the newest snapshot's model; 0 where there is none."""
        tensors = self.manifest.tensors.values() if self.manifest else ()
        return sum(math.prod(info.shape) for info in tensors if info.part.startswith("model"))

    @property
    def last_step(self) -> int:
        return max([*(self.kept[a.attempt] for a in self.on_line), *self.past.steps[-1:]], default=0)

    @property
    def settings(self) -> Mapping[str, Any]:
        """The config of the newest attempt, plain; empty where nothing tells it."""
        return read_config(self.past.folder) or (self.manifest.config if self.manifest else {})

    @property
    def config(self) -> str:
        """config.yaml, or "" where there is none, as in older runs."""
        raw = Folder(self.past.folder, "RUN").read(NAME, LONGEST) or b""
        return raw.decode(errors="replace")

    def _end(self, account: Account, newest: Account) -> str:
        """Of an attempt that has noted none. A claim says which process made it, which may be alive."""
        if account is not newest:
            return "killed"
        claim = self.past.claims.get(account.attempt)
        alive = runs_here(claim) if claim else None
        return {True: "running", False: "killed", None: "running, or killed"}[alive]

    def _older(self, number: int) -> Account:
        """What its claim, the newest snapshot and the metrics tell of an attempt without an account, or of a rewind."""
        claim, entry = self.past.claims[number], self.past.entries.get(number, {})
        row = self.past.rows.get(number, [{}])[-1]
        world = entry.get("world_size", row.get("world_size"))
        return Account(
            attempt=number,
            from_step=claim.from_step,
            step=self.kept[number],
            world_size=world if type(world) is int else 0,
            device=str(numerics_of(entry).get("device", "")),
            host="",
            started=_time(entry.get("at")),
            until=UNKNOWN,
            seconds={},
            end="" if claim.by != REWIND else "undo" if claim.undoes else "rewind",
        )


def _rates(stretch: Stretch, end: int) -> tuple[Floats, Floats] | None:
    """Steps and learning rates of a stretch, no step after `end`; None with code of the user's own, which is not run."""
    raw = filled(stretch.config)
    optimizer, schedule = (kind(**declared(name, raw)) for name, kind in (("optimizer", Optimizer), ("schedule", Schedule)))
    batch, last = Batch(**raw["batch"]), min(stretch.last, end)
    if schedule.target:
        return None
    size = batch.global_size if batch.per_process_size is None else batch.per_process_size * stretch.world_size
    peak = optimizer.lr * batch_factor(optimizer, size)
    corners = [s for s in (schedule.warmup_steps + 1, schedule.stable_until + 1) if stretch.first <= s <= last]
    count = max(0, min(RATES, last - stretch.first + 1))
    steps = np.unique([*np.linspace(stretch.first, last, count).astype(int), *corners])
    return steps.astype(float), np.array([peak * schedule_factor(schedule, int(step) - 1) for step in steps])


def _number(value: object) -> float:
    """NaN for what is no number: JSON lines hold null for a number that is not finite."""
    try:
        return float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:  # JSON's integers have any length
        return math.inf


def _curve(points: Iterable[tuple[int, object]]) -> Curve:
    pairs = np.array([(step, _number(value)) for step, value in points], dtype=float).reshape(-1, 2)
    return Curve.of(pairs[:, 0], pairs[:, 1])


def _time(text: object) -> float:
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else UNKNOWN
    except (ValueError, OverflowError):
        return UNKNOWN
