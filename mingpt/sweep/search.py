"""A search by Optuna, asked and told: which trial is next follows from how those before it went."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from mingpt.config.schema import Config
from mingpt.console import complain
from mingpt.errors import FINISHED, USER_ERROR, UserError
from mingpt.observe.jsonl import read_metrics
from mingpt.redact import without_secrets
from mingpt.sweep.expand import Trial, divide, trial_of, validate, values_of
from mingpt.sweep.record import entry_of, last_of, note, read_record

JOURNAL = "optuna.journal"
DIGITS = 6  # of a number from an interval: a folder's name has it


class Key:
    """What is searched: values: those of a list; None: an interval's, which are numbers."""

    def __init__(self, override: Override, options: Sequence[str]) -> None:
        """Raises UserError for values that Optuna has no distribution for."""
        spread: Any = override.value()
        log = "log" in getattr(spread, "tags", ())
        self.values = None if override.is_interval_sweep() else values_of(override, options)
        self.distribution: BaseDistribution
        try:
            if isinstance(spread, IntervalSweep):
                low: Any = spread.start  # Hydra's types say float; int(interval(…)) has integers
                high: Any = spread.end
                kind = IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
                self.distribution = kind(low, high, log=log)
            elif isinstance(spread, RangeSweep):
                self.distribution = IntDistribution(0, len(self.values or ()) - 1)
            else:
                self.distribution = CategoricalDistribution(self.values or ())
            if log and self.values:
                raise ValueError("a logarithmic scale is for an interval: write tag(log, interval(a,b))")
        except ValueError as error:
            raise UserError(f"{without_secrets(override.input_line)}: {error}") from error

    def text(self, drawn: Any) -> str:
        """A value in Hydra's grammar."""
        distribution = self.distribution
        if isinstance(distribution, FloatDistribution):
            short = f"{drawn:.{DIGITS}g}"
            return short if distribution.low <= float(short) <= distribution.high else repr(drawn)
        return self.values[drawn] if self.values and isinstance(distribution, IntDistribution) else str(drawn)


class Search:
    """Trials by their numbers, from 0. What is drawn for one follows from its number and from those told before."""

    def __init__(
        self, options: Sequence[str], texts: Sequence[str], folder: str, metric: str, number: int, world_size: int
    ) -> None:
        """number: of trials in all. Raises UserError with every problem of the overrides."""
        fixed, several, problems = divide(texts)
        self.keys = dict[str, Key]()
        for name, override in several.items():
            try:
                self.keys[name] = Key(override, options)
            except UserError as error:
                problems += error.problems
        if not several:
            problems.append("--optimize: there is nothing to search: give a key several values, or an interval")
        if problems:
            raise UserError(*problems)
        self.fixed, self.folder, self.metric, self.number = [*options, *fixed], folder, metric, number
        self.world_size, self.running = world_size, dict[str, list[int]]()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study()  # in memory
        self.corners = self._corners()

    def _corners(self) -> dict[str, Config]:
        """The configs of the lowest and of the highest values. Raises UserError if both are wrong."""
        found, wrong = dict[str, Config](), list[UserError]()
        for at in ("low", "high"):
            drawn = {
                name: getattr(key.distribution, at, (key.values or [""])[0 if at == "low" else -1])
                for name, key in self.keys.items()
            }
            try:
                found |= self._validated(self._trial(drawn))
            except UserError as error:
                wrong.append(error)
        if not found:
            raise wrong[0]
        return found

    def _validated(self, trial: Trial) -> dict[str, Config]:
        return validate([trial], self.world_size)

    def _trial(self, drawn: dict[str, Any]) -> Trial:
        return trial_of({name: key.text(drawn[name]) for name, key in self.keys.items()}, self.fixed, self.folder)

    def first(self) -> tuple[Trial, Config]:
        """That of a search which has not begun."""
        _, trial = self._ask()
        return trial, self._validated(trial)[trial.name]

    def open(self) -> None:
        """Go on with what the folder's journal has. Raises UserError if that is another search, or damaged."""
        path = Path(self.folder, JOURNAL)
        is_this = {
            "metric": self.metric,
            "fixed": [str(without_secrets(text)) for text in self.fixed],
            "space": {
                name: [distribution_to_json(key.distribution), key.values] for name, key in sorted(self.keys.items())
            },
        }
        try:
            _drop_half_a_line(path)
            storage = JournalStorage(JournalFileBackend(str(path)))
            self.study = optuna.create_study(storage=storage, study_name="sweep", load_if_exists=True)
            was = self.study.user_attrs.get("search")
        except (ValueError, KeyError, TypeError) as error:  # Optuna's own, for a file that another program wrote
            raise UserError(f"{path} can't be read: delete it, and run the sweep") from error
        if was is None:
            self.study.set_user_attr("search", is_this)
        elif was != json.loads(json.dumps(is_this)):
            other = ", ".join(key for key in is_this if was.get(key) != json.loads(json.dumps(is_this[key])))
            raise UserError(f"{path} has another search (other: {other}): take another --name, or the former command")

    def _ask(self) -> tuple[int, Trial]:
        seed = len(self.study.get_trials(deepcopy=False))
        self.study.sampler = TPESampler(seed=seed, constant_liar=True)
        asked = self.study.ask({name: key.distribution for name, key in self.keys.items()})
        return asked.number, self._trial(asked.params)

    def _asked(self, *states: TrialState) -> list[FrozenTrial]:
        """Without those that were noted in part when the sweep was killed."""
        found = self.study.get_trials(deepcopy=False, states=states or None)
        return [trial for trial in found if trial.params.keys() == self.keys.keys()]

    def jobs(self) -> Iterator[tuple[Trial, Config]]:
        """First those that were running when the sweep ended, then new ones. One is drawn when it is taken."""
        for one in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if one.params.keys() != self.keys.keys():
                self.study.tell(one.number, state=TrialState.FAIL)
            else:
                yield from self._job(one.number, self._trial(one.params))
        while len(self._asked()) < self.number:
            yield from self._job(*self._ask())

    def _job(self, number: int, trial: Trial) -> Iterator[tuple[Trial, Config]]:
        """Nothing, if a trial with the same values is there, or if the config is refused."""
        if trial.name in self.running:
            self.running[trial.name].append(number)
            return
        try:
            config = self._validated(trial)[trial.name]
        except UserError as error:
            complain(f"{trial.name}: can't be trained: {error}")
            self.study.tell(number, state=TrialState.FAIL)
            return
        self.running[trial.name] = [number]
        if note(self.folder, {trial.name: entry_of(trial, config)}):
            pruned = (read_record(self.folder) or {})[trial.name].pruned
            self.ended(trial, FINISHED, pruned)
        else:
            yield trial, config

    def ended(self, trial: Trial, code: int, pruned: bool) -> None:
        """Tell Optuna. A trial that was stopped or has crashed stays as running: the next start resumes it."""
        for number in self.running.pop(trial.name):
            if pruned:
                self.study.tell(number, state=TrialState.PRUNED)
            elif code == USER_ERROR:
                self.study.tell(number, state=TrialState.FAIL)
            elif code == FINISHED:
                value = last_of(read_metrics(trial.folder), self.metric)
                if isinstance(value, (int, float)) and math.isfinite(value):
                    self.study.tell(number, value)
                else:
                    complain(f"{trial.name}: has finished without a {self.metric}: the search takes it as failed")
                    self.study.tell(number, state=TrialState.FAIL)

    def code(self) -> int:
        return USER_ERROR if self._asked(TrialState.FAIL) else FINISHED

    def names(self) -> list[str]:
        """Of the trials that have a folder."""
        known = read_record(self.folder) or {}
        names = dict.fromkeys(self._trial(one.params).name for one in self._asked())
        return [name for name in names if name in known]


def _drop_half_a_line(path: Path) -> None:
    """What a sweep that was killed had written of its last line: Optuna would append to it."""
    if path.exists():
        raw = path.read_bytes()
        if len(raw) != (whole := raw.rfind(b"\n") + 1):
            with path.open("r+b") as file:
                file.truncate(whole)
