"""What the page's charts draw, as JSON: the curves of each run by step, its attempts, and its skipped steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mingpt.observe.ledger import Account
from mingpt.report.html import plain
from mingpt.report.reading import Curve, Floats, Run

POINTS = 4000  # of a curve, more than a screen has pixels; a longer one is drawn as mean and range of as many groups
ALL_POINTS = 40_000  # of all runs together
LARGEST = 1e30  # of a value that is drawn, so that no sum overflows
LOGGED = ("val_loss", "tokens_per_second", "mfu", "tokens_seen", "step_seconds")  # of the metrics
MARKS = 200  # attempts that are drawn, and skipped steps


def groups(x: Floats, y: Floats, most: int = POINTS) -> tuple[Floats, Floats, Floats, Floats]:
    """Mean x, and mean, least and largest y, of at most `most` groups of neighbours. Only finite points count."""
    good = np.isfinite(x) & np.isfinite(y)
    x, y = x[good], np.clip(y[good], -LARGEST, LARGEST)
    if len(x) <= most:
        return x, y, y, y
    starts = np.linspace(0, len(x), most + 1).astype(int)
    sizes, at = np.diff(starts), starts[:-1]
    means = np.add.reduceat(x, at) / sizes, np.add.reduceat(y, at) / sizes
    return *means, np.minimum.reduceat(y, at), np.maximum.reduceat(y, at)


def curves(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What is drawn of each run: its curves by step, its attempts, its skipped steps, and what it was forked from.

    fork.of: the parent's place among the runs; None if it is not one of them.
    """
    most = min(POINTS, ALL_POINTS // len(runs) + 1)
    return [_of_run(run, runs, most) for run in runs]


def _of_run(run: Run, runs: Sequence[Run], most: int) -> dict[str, Any]:
    drawn = {"loss": run.loss, "grad_norm": run.of_each_step("norm", "grad_norm"), "lr": run.lr}
    drawn |= {key: run.curve(key) for key in LOGGED}
    parent, skipped = run.past.parent, list[tuple[int, bool]]()
    of = next((i for i, other in enumerate(runs) if other is not run and run.past.is_fork_of(other.past)), None)
    for row in run.past.metrics:
        if isinstance(bad := row.get("skipped"), dict):
            skipped.append((row["step"], bad.get("spike") is True))
    return {
        "name": plain(run.folder, 40),
        "curves": {name: _points(curve, most) for name, curve in drawn.items()},
        "attempts": [_of_attempt(run, account) for account in run.attempts[-MARKS:]],
        "skipped": skipped[-MARKS:],
        "fork": {"of": of, "step": parent.step} if parent else None,
    }


def _of_attempt(run: Run, account: Account) -> dict[str, Any]:
    """first, last: the steps that the run kept of it, none if they are equal. dropped: batches, of a rollback."""
    claim = run.past.claims.get(account.attempt)
    return {
        "number": account.attempt,
        "first": account.from_step,
        "last": run.kept[account.attempt],
        "kind": plain(account.processes),
        "host": plain(account.host),
        "end": plain(account.end),
        "dropped": claim and claim.dropped,
    }


def _points(curve: Curve, most: int) -> dict[str, list[float]]:
    """A curve as JSON. low, high: the range of each group, where points stand for groups."""
    x, mean, low, high = groups(curve.steps, curve.values, most)
    parts = {"x": x, "y": mean} | ({"low": low, "high": high} if mean is not low else {})
    return {name: [_short(value) for value in part.tolist()] for name, part in parts.items()}


def _short(value: float) -> float:
    """In six digits, but to a tenth at least: steps and tokens in their millions stay apart."""
    return float(f"{value:.6g}") if abs(value) < 1e5 else round(value, 1)
