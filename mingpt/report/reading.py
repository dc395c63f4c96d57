"""What a report shows of a run, from its history. Its files may come from anybody: nothing is believed."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mingpt.compute.optimizer import batch_factor, schedule_factor
from mingpt.config.configfile import read_config
from mingpt.config.keys import declared, filled
from mingpt.config.schema import Optimizer, Schedule
from mingpt.errors import UserError
from mingpt.history.history import History, Stretch, numerics_of
from mingpt.observe.ledger import Account, Ledger, added_up
from mingpt.snapshot.attempts import REWIND, runs_here

Floats = npt.NDArray[np.float64]
UNKNOWN = math.nan
GONE_BACK = ("rewind", "undo")  # the ends of what is no attempt
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


class Run:
    """A run as a report shows it. past: its history. manifest: of its newest snapshot. kept: see History."""

    def __init__(self, url: str) -> None:
        """Raises UserError if nothing of a run is there."""
        self.past = History.open(url)
        self.manifest, self.kept = self.past.newest, self.past.kept

    @property
    def name(self) -> str:
        return self.manifest.run if self.manifest else self.folder

    @property
    def folder(self) -> str:
        """The name of the run's folder: among several runs one's own, which run.name need not be."""
        return self.past.folder.rstrip("/").rpartition("/")[2]

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

    @property
    def starts(self) -> int:
        """How many attempts there are, without rewinds."""
        return sum(account.end not in GONE_BACK for account in self.attempts)

    @cached_property
    def ledger(self) -> Ledger | None:
        return added_up(self.past.accounts, self.past.claims) if self.past.accounts else None

    @cached_property
    def loss(self) -> Curve:
        return self.of_each_step("loss", "loss")

    def of_each_step(self, field: str, key: str) -> Curve:
        """A field of the trace; of steps that it has not recorded, a key of the metrics."""
        traced, logged = self.past.kept_trace.values(), self.curve(key)
        return Curve.of(
            np.concatenate([*(part["step"] for part in traced), logged.steps]),
            np.concatenate([*(part[field] for part in traced), logged.values]),
        )

    @property
    def lr(self) -> Curve:
        """The rate of each step, from its config; as logged where that does not tell, as with one's own schedule."""
        try:
            return Curve.of(*np.concatenate([_rates(s, self.last_step) for s in self.past.stretches], axis=1))
        except (UserError, ValueError, TypeError, LookupError, ArithmeticError):  # a stranger's config may be anything
            return self.curve("lr")

    def curve(self, key: str) -> Curve:
        return _curve((row["step"], row[key]) for row in self.past.metrics if key in row)

    @property
    def parameters(self) -> int:
        """How many the newest snapshot's model has; 0 without a snapshot."""
        tensors = self.manifest.tensors.values() if self.manifest else ()
        return sum(math.prod(info.shape) for info in tensors if info.part.startswith("model"))

    @property
    def last_step(self) -> int:
        kept = (self.kept[a.attempt] for a in self.attempts if self.kept[a.attempt] > a.from_step)
        return max([*kept, *self.past.steps[-1:]], default=0)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The config of the newest attempt, plain; empty where nothing tells it."""
        return read_config(self.past.folder) or (self.manifest.config if self.manifest else {})

    def _end(self, account: Account, newest: Account) -> str:
        """The end of an attempt that has noted none. A claim says which process made it, which may be alive."""
        if account is not newest:
            return "killed"
        claim = self.past.claims.get(account.attempt)
        alive = runs_here(claim) if claim else None
        return {True: "running", False: "killed", None: "running, or killed"}[alive]

    def _older(self, number: int) -> Account:
        """What its claim, the newest snapshot and the metrics tell of an attempt without an account, or of a rewind."""
        claim, entry = self.past.claims[number], self.past.entries.get(number, {})
        row, process = self.past.rows.get(number, [{}])[-1], claim.process or {}
        world = entry.get("world_size", row.get("world_size"))
        end: str | None = ""
        if claim.by == REWIND:
            end = "undo" if claim.undoes else "rewind"
        elif process and self.kept[number] == claim.from_step:
            end = None  # before its first step
        return Account(
            attempt=number,
            from_step=claim.from_step,
            step=self.kept[number],
            world_size=world if type(world) is int else 0,
            device=str(numerics_of(entry).get("device", "")),
            host=str(process.get("host", "")),
            started=_time(entry.get("at", claim.at)),
            until=UNKNOWN,
            seconds={},
            end=end,
        )


def _rates(stretch: Stretch, end: int) -> Floats:
    """Steps of a stretch and their learning rates, up to step `end`. Raises an error if the config does not tell."""
    raw = filled(stretch.config)
    optimizer, schedule = Optimizer(**declared("optimizer", raw)), Schedule(**declared("schedule", raw))
    if schedule.target:
        raise ValueError(f"{schedule.target}: code of the user's own is not run because a run names it")
    size = raw["batch"]["global_size"]
    if (each := raw["batch"]["per_process_size"]) is not None:
        size = each * stretch.world_size
    last = min(stretch.last, end)
    steps = np.linspace(stretch.first, last, min(RATES, max(0, last - stretch.first + 1))).astype(int)
    peak = optimizer.lr * batch_factor(optimizer, size)
    return np.array([steps, [peak * schedule_factor(schedule, step - 1) for step in steps.tolist()]])


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
