"""What the page's charts draw, as JSON: the curves of each run by step, its attempts, and what happened to it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mingpt.report.html import plain
from mingpt.report.reading import Curve, Floats, Run

COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#ec4899", "#14b8a6", "#94a3b8", "#84cc16", "#d97706")
POINTS = 4000  # of a curve, more than a screen has pixels; a longer one is drawn as mean and range of as many groups
ALL_POINTS = 40_000  # of all runs together
LARGEST = 1e30  # of a value that is drawn, so that no sum overflows
MARKS = 200  # attempts, and marks, that are drawn


def color(number: int) -> str:
    return COLORS[number % len(COLORS)]


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
    """Of each run: name, color, its curves by step, tokens and hours by step, bands (attempts), marks, and its fork."""
    most = min(POINTS, ALL_POINTS // len(runs) + 1)
    return [_of_run(run, color(i), runs, most) for i, run in enumerate(runs)]


def _of_run(run: Run, shade: str, runs: Sequence[Run], most: int) -> dict[str, Any]:
    drawn = {
        "loss": run.loss,
        "norm": run.norm,
        "val": run.curve("val_loss"),
        "lr": run.lr,
        "speed": run.curve("tokens_per_second"),
        "mfu": run.curve("mfu"),
    }
    parent = run.past.parent
    of = next((i for i, other in enumerate(runs) if other is not run and run.past.is_fork_of(other.past)), None)
    before = 0.0
    if of is not None and parent and len((earlier := runs[of].hours).steps):
        before = float(np.interp(parent.step, earlier.steps, earlier.values))
    kinds = shades(run)
    bands = [
        {
            "first": account.from_step,
            "last": run.kept[account.attempt],
            "color": kinds.get(account.processes, COLORS[7]),
            "kind": plain(account.processes),
            "label": plain(f"attempt {account.attempt}: {account.processes} {account.host}"),
        }
        for account in run.on_line[-MARKS:]
    ]
    return {
        "name": plain(run.name, 40),
        "color": shade,
        "curves": {name: _points(curve, most) for name, curve in drawn.items()},
        "tokens": _points(run.tokens, most),
        "hours": _points(Curve(run.hours.steps, run.hours.values + before), most),
        "bands": bands,
        "marks": [(step, plain(kind), plain(words)) for step, kind, words in run.marks[-MARKS:]],
        "fork": None if of is None or parent is None else {"of": of, "step": parent.step},
    }


def shades(run: Run) -> dict[str, str]:
    """A color for each number of processes and kind of machine that the run had."""
    kinds = dict.fromkeys(account.processes for account in run.attempts if account.processes)
    return {kind: color(i + 1) for i, kind in enumerate(kinds)}


def _points(curve: Curve, most: int) -> dict[str, list[float]]:
    """A curve in six digits. low, high: the range of each group, where points stand for groups."""
    x, mean, low, high = groups(curve.steps, curve.values, most)
    parts = {"x": x, "y": mean} | ({"low": low, "high": high} if mean is not low else {})
    return {name: [float(f"{value:.6g}") for value in part.tolist()] for name, part in parts.items()}
