"""The page of a sweep: a table of its trials, and a picture with one line a trial."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from mingpt.redact import printable
from mingpt.report.figures import GRID, STYLE, svg
from mingpt.report.html import document, table_of, text
from mingpt.sweep.record import cell, columns

MOST_LINES = 300  # drawn, those with the lowest losses
PICTURE = "parallel-coordinates"
PAPER: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}  # behind a value


def page(name: str, found: Sequence[Mapping[str, Any]], drawn: Figure | None) -> str:
    names = columns(found)
    rows = [[row.get("trial"), *(cell(row.get(key)) for key in names)] for row in found]
    shown = f'<figure class="card">{svg(drawn, PICTURE)}</figure>' if drawn else ""
    return document(name, f"<h1>{text(name)}: {len(found)} trials</h1>{shown}{table_of(['trial', *names], rows)}")


def picture(found: Sequence[Mapping[str, Any]]) -> Figure | None:
    """An axis for each key, and one for the loss, which colours the lines. None if no trial has a loss."""
    key = "val_loss" if any(_known(row, "val_loss") for row in found) else "loss"
    good = [row for row in found if _known(row, key)][:MOST_LINES]
    if not good:
        return None
    axes = [*(name for name in columns(good) if name not in ("state", "step", "loss", "val_loss")), key]
    places = {name: _places([row.get(name) for row in good]) for name in axes}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(max(4.2, 1.6 * len(axes)), 3.2))
        plot = figure.subplots()
        shades = matplotlib.colormaps["viridis"]
        for i in reversed(range(len(good))):
            line = [places[name][str(good[i].get(name))] for name in axes]
            plot.plot(range(len(axes)), line, color=shades(places[key][str(good[i][key])]))
        for x, name in enumerate(axes):
            plot.axvline(x, color=GRID, zorder=0)
            marks = sorted(places[name].items(), key=lambda item: item[1])
            for value, at in marks if len(marks) <= 6 else [marks[0], marks[-1]]:
                near: dict[str, Any] = {"xytext": (3, 2), "textcoords": "offset points", "fontsize": 7}
                plot.annotate(_short(value), (x, at), bbox=PAPER, zorder=9, **near)
        plot.set_xticks(range(len(axes)), [printable(name) for name in axes])
        plot.set_yticks([])
        plot.grid(False)
        for side in plot.spines.values():
            side.set_visible(False)
    return figure


def _known(row: Mapping[str, Any], key: str) -> bool:
    value = row.get(key)
    return isinstance(value, (int, float)) and math.isfinite(value)


def _short(value: str) -> str:
    try:
        return f"{float(value):.4g}"
    except ValueError:
        return printable(value)[:20]


def _places(values: Sequence[object]) -> dict[str, float]:
    """Each value's height from 0 to 1: numbers by size, or by logarithm if they span decades; words in their order."""
    texts = sorted({str(value) for value in values})
    try:
        numbers = {text: float(text) for text in texts}
    except ValueError:
        numbers = {text: float(i) for i, text in enumerate(texts)}
    if min(numbers.values()) > 0 and max(numbers.values()) >= 10 * min(numbers.values()):
        numbers = {text: math.log(number) for text, number in numbers.items()}
    low, high = min(numbers.values()), max(numbers.values())
    return {text: (number - low) / (high - low) if high > low else 0.5 for text, number in numbers.items()}
