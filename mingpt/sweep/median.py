"""Which trials are worse than the median of the others: Optuna's MedianPruner on what their runs have written."""

import time
from collections.abc import Iterable

import optuna
from optuna.trial import TrialState, create_trial

from mingpt.observe.jsonl import read_metrics

METRIC = "val_loss"
FIRST = 5  # trials that end before one is pruned (Optuna's own number)
LOOK_SECONDS = 1.0  # between two looks at the metrics, and SHARE times the seconds of a look
SHARE = 20


class Median:
    """Knows the validation losses of the trials that have finished."""

    def __init__(self, finished: Iterable[str]) -> None:
        """finished: folders of trials."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(pruner=optuna.pruners.MedianPruner(n_startup_trials=FIRST))
        self._next = 0.0
        for folder in finished:
            self.add(folder)

    def add(self, folder: str) -> None:
        if curve := _curve(folder):
            self.study.add_trial(create_trial(value=curve[max(curve)], intermediate_values=curve))

    def is_time(self) -> bool:
        """Whether to look at the trials now. Looks take a small share of the time."""
        if (now := time.monotonic()) < self._next:
            return False
        self._next = now + LOOK_SECONDS
        return True

    def reason(self, folder: str, max_steps: int) -> str | None:
        """Why this trial should stop: its lowest loss so far is above the median of the others' at its newest step."""
        began = time.monotonic()
        curve = _curve(folder)
        self._next += SHARE * (time.monotonic() - began)
        if not curve or max(curve) >= max_steps:  # it is ending
            return None
        trial = create_trial(state=TrialState.RUNNING, intermediate_values=curve)
        if not self.study.pruner.prune(self.study, trial):
            return None
        return f"step {max(curve)}: its lowest {METRIC}, {min(curve.values()):.4f}, is above the median"


def _curve(folder: str) -> dict[int, float]:
    rows = read_metrics(folder)
    return {row["step"]: row[METRIC] for row in rows if isinstance(row.get(METRIC), (int, float))}
