"""Line charts as SVG. Their ink is the page's own, so they are readable in light and in dark, at any width."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mingpt.report.html import Html, text
from mingpt.report.reading import Curve, Floats

COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#ec4899", "#14b8a6", "#94a3b8", "#84cc16", "#d97706")
POINTS = 300  # drawn of a curve; more are drawn as mean and range of as many groups
LARGEST = 1e30  # of a value that is drawn, so that no sum overflows
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 440, 250, 56, 24, 220  # of a chart, and of its axes in it


def color(number: int) -> str:
    return COLORS[number % len(COLORS)]


@dataclass(frozen=True)
class Line:
    """marks: a dot at each point, for a curve of few."""

    label: str
    curve: Curve
    color: str
    marks: bool = False


@dataclass(frozen=True)
class Band:
    """Steps begin to end, behind the lines."""

    begin: float
    end: float
    color: str


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


def chart(title: str, lines: Sequence[Line], bands: Sequence[Band] = (), floor: bool = False) -> Html:
    """Lines over steps. floor: the axis begins at 0. A few values far above the rest may lie beyond its end."""
    drawn = [(line, *groups(line.curve.steps, line.curve.values)) for line in lines]
    xs = np.concatenate([np.array([0.0]), *(x for _, x, *_ in drawn)])
    ys = np.concatenate([np.array([0.0] * floor), *(mean for _, _, mean, *_ in drawn)])
    if not len(ys):
        return Html("")
    low, high = float(ys.min()), _top(ys)
    high = high if high > low else low + (abs(low) or 1)
    right = max(float(xs.max()), 1)

    def x_of(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 8) * step / right

    def y_of(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (min(value, high) - low) / (high - low)

    def path(x: Floats, y: Floats) -> str:
        return " ".join(f"{x_of(a):.1f},{y_of(b):.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))

    parts = [
        f'<rect x="{x_of(b.begin):.1f}" y="{TOP}" width="{x_of(b.end) - x_of(b.begin):.1f}" height="{BOTTOM - TOP}" '
        f'fill="{b.color}" opacity=".13"/><path class="grid" d="M{x_of(b.begin):.1f} {TOP}V{BOTTOM}"/>'
        for b in bands
    ]
    for y in ticks(low, high):
        at = f"{y_of(y):.1f}"
        parts.append(f'<path class="grid" d="M{LEFT} {at}H{WIDTH - 8}"/><text x="{LEFT - 5}" y="{at}">{y:g}</text>')
    parts += [f'<text class="x" x="{x_of(x):.1f}" y="{BOTTOM + 16}">{x:,g}</text>' for x in ticks(0, right)]
    for line, x, mean, least, most in drawn:
        if mean is not least:
            around = path(np.append(x, x[::-1]), np.append(least, most[::-1]))
            parts.append(f'<polygon points="{around}" fill="{line.color}" opacity=".25"/>')
        parts.append(f'<polyline points="{path(x, mean)}" stroke="{line.color}"/>')
        spots = zip(x.tolist(), mean.tolist(), strict=True) if line.marks or len(x) == 1 else ()
        parts += [f'<circle cx="{x_of(a):.1f}" cy="{y_of(b):.1f}" r="2.5" fill="{line.color}"/>' for a, b in spots]
    names = "".join(f'<i style="background:{line.color}"></i>{text(line.label, 30)} ' for line in lines if line.label)
    body = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(title)}">{"".join(parts)}</svg>'
    return Html(f'<figure class="card"><b>{text(title)}</b> <span class="soft">{names}</span>{body}</figure>')


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most `most` round numbers from low to high, and one more where both ends are round."""
    size = 10 ** math.floor(math.log10((high - low) / most))
    step = next(size * m for m in (1, 2, 5, 10, 20) if (high - low) / (size * m) <= most)
    return [float(f"{k * step:.6g}") for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _top(values: Floats) -> float:
    """The upper end of an axis: a few spikes far above the rest do not flatten all else."""
    top, usual = float(values.max()), float(np.median(np.abs(values)))
    return top if top <= 6 * usual or usual == 0 else float(np.quantile(values, 0.99))
