"""The pictures of a report. Each is drawn once, and written as SVG for the page and as PNG."""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mingpt.observe.ledger import LABELS, Account
from mingpt.redact import printable
from mingpt.report.forks import joined
from mingpt.report.reading import Curve, Floats, Run, seconds, tokens

COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#ec4899", "#14b8a6", "#94a3b8", "#84cc16", "#d97706")
INK, GRID, BAD = "#1f2933", "#d5dbe1", "#dc2626"  # INK and GRID become variables of the page's style
SIZE = (4.2, 2.7)  # inches: about the width of a phone, so that texts keep their size there
POINTS = 300  # drawn of a curve; more are drawn as mean and range of as many groups
MARKS = 200  # drawn of snapshots, attempts and skipped steps
LARGEST = 1e30  # of a value that is drawn, so that no sum overflows
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # texts stay texts
    "text.parse_math": False,  # a run's name may hold a $
    "font.size": 9,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.6,
    "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "lines.linewidth": 1.3,
    "figure.constrained_layout.use": True, "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip
UNITS = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


@contextmanager
def _styled(salt: str = "") -> Iterator[None]:
    """Our style, whatever a matplotlibrc on this machine says. salt: of the ids in an SVG file."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # names that are long, or in letters that this font lacks
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | {"svg.hashsalt": salt})
        yield


def color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def kind(attempt: Account) -> str:
    """How many processes on what; "" for a rewind."""
    return " × ".join(str(part) for part in (attempt.world_size, attempt.device) if part)


def kinds(runs: Sequence[Run]) -> dict[str, str]:
    """A colour for each kind of world that there was."""
    found = dict.fromkeys(kind(a) for run in runs for a in run.attempts if kind(a))
    return {name: color(i) for i, name in enumerate(found)}


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


def pictures(runs: Sequence[Run]) -> dict[str, Figure]:
    """All pictures by name: curves of all runs, and a time line and a ledger of each."""
    runs = joined(runs)
    steps: Callable[[Run, Floats], Floats] = lambda run, steps: steps  # noqa: E731
    unit, word = _unit(max((run.ledger.wall if run.ledger else float(_last(run))) for run in runs))
    since = "since the start" if all(run.ledger for run in runs) else "of training"
    axes = {
        "steps": ("step", steps),
        "tokens": ("tokens", tokens),
        "time": (f"{word} {since}", lambda run, steps: seconds(run, steps) / unit),
    }
    found = {}
    with _styled():
        for name, (label, axis) in axes.items():
            found[f"loss-{name}"] = _curves(runs, "loss", label, axis, lambda r: r.loss, lambda r: r.curve("val_loss"))
        found["learning-rate"] = _curves(runs, "learning rate", "step", steps, lambda run: run.curve("lr"))
        found["gradient-norm"] = _curves(runs, "gradient norm", "step", steps, lambda run: run.grad_norm, log=True)
        found["tokens-per-second"] = _curves(
            runs, "tokens/s", "step", steps, lambda run: run.curve("tokens_per_second"), floor=True
        )
        for i, run in enumerate(runs, 1):
            last = "" if len(runs) == 1 else f"-{i}"
            if run.components:
                found[f"components{last}"] = _components(run)
            found[f"attempts{last}"] = _time_line(run, kinds(runs))
            if run.ledger:
                found[f"ledger{last}"] = _ledger(run)
    return found


def _last(run: Run) -> float:
    times = seconds(run, run.loss.steps[-1:])
    return float(times[0]) if len(times) and np.isfinite(times[0]) else 0


def _unit(longest: float) -> tuple[int, str]:
    return next((u for u in UNITS if longest >= 2 * u[0]), UNITS[-1])


def _curves(
    runs: Sequence[Run],
    title: str,
    label: str,
    axis: Callable[[Run, Floats], Floats],
    of: Callable[[Run], Curve],
    also: Callable[[Run], Curve] | None = None,
    log: bool = False,
    floor: bool = False,
) -> Figure:
    """of: the curve; also: a second one with points, the validation loss."""
    figure = Figure(SIZE)
    ax = figure.add_subplot(title=title, xlabel=label)
    tops, positive = list[float](), False
    for i, run in enumerate(runs):
        curve, main = of(run), color(i) if len(runs) > 1 else INK if also else color(0)
        x, mean, low, high = groups(axis(run, curve.steps), curve.values)
        positive |= bool((low > 0).any())
        if len(x) and mean is not low:
            ax.fill_between(x, low, high, color=main, alpha=0.25, linewidth=0)
        ax.plot(x, mean, color=main, marker="o" if len(x) == 1 else "", label=_label(runs, i))
        bad = axis(run, curve.steps[~np.isfinite(curve.values)])
        ax.plot(_thinned(bad), [0.05] * len(_thinned(bad)), "x", color=BAD, transform=ax.get_xaxis_transform())
        tops += [_top(curve.values)]
        if also and len((second := also(run)).steps):
            sx, sy, *_ = groups(axis(run, second.steps), second.values)
            ax.plot(sx, sy, "--", color=main if len(runs) > 1 else color(3), marker="o", markersize=3,
                    label="validation" if len(runs) == 1 else None)  # fmt: skip
            tops += [_top(second.values)]
    if log and positive:
        ax.set_yscale("log")
        low_end, top = ax.get_ylim()
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter("{x:g}" if top < 10 * low_end else "")
    elif tops and (top := max(tops)) > 0:
        low_end = 0 if floor else min(ax.get_ylim()[0], top)
        ax.set_ylim(low_end, top + 0.05 * (top - low_end))
    if len(runs) == 1:
        _bands(ax, runs[0], axis)
    if len(runs) > 1 or (also and len(also(runs[0]).steps)):
        ax.legend(loc="best")
    return figure


def _components(run: Run) -> Figure:
    figure = Figure(SIZE)
    ax = figure.add_subplot(title="validation loss on each component", xlabel="step")
    for i, key in enumerate(run.components):
        curve = run.curve(key)
        x, mean, *_ = groups(curve.steps, curve.values)
        dashes = ("-", "--", ":", "-.")[i // len(COLORS) % 4]  # when the colours come again
        name = printable(key.partition("/")[2])[:30]
        ax.plot(x, mean, dashes, color=color(i), marker="o", markersize=3, label=name)
    ax.legend(loc="best")
    return figure


def _label(runs: Sequence[Run], i: int) -> str:
    return "training" if len(runs) == 1 else f"{i + 1}: {printable(runs[i].name)[:30]}"


def _top(values: Floats) -> float:
    """The upper end of an axis: a few spikes far above the rest do not flatten all else."""
    values = np.clip(values[np.isfinite(values)], -LARGEST, LARGEST)
    if not len(values):
        return 0
    top, usual = float(values.max()), float(np.median(np.abs(values)))
    return top if top <= 6 * usual or usual == 0 else float(np.quantile(values, 0.99))


def _thinned(x: Floats) -> Floats:
    x = x[np.isfinite(x)]
    return x[:: len(x) // MARKS + 1]


def _bands(ax: Axes, run: Run, axis: Callable[[Run, Floats], Floats]) -> None:
    """The attempts behind a curve: a colour for each kind of world, and a line at each start."""
    ends, colors = ax.get_xlim(), kinds([run])
    for a in run.on_line[-MARKS:]:
        begin, end = axis(run, np.array([a.from_step + 1, run.kept[a.attempt]], float))
        if np.isfinite([begin, end]).all():
            ax.axvspan(begin, end, color=colors.get(kind(a), GRID), alpha=0.13, linewidth=0)
            if a.from_step:
                ax.axvline(begin, color=INK, alpha=0.5, linewidth=0.6, linestyle=":")
    ax.set_xlim(ends)


def _time_line(run: Run, colors: Mapping[str, str]) -> Figure:
    """When which kind of world computed, how each attempt ended, and the snapshots. Without a ledger: against steps."""
    attempts = (run.ledger.accounts if run.ledger else run.on_line)[-MARKS:]
    ends = {a.attempt: a.end for a in run.attempts}
    rows = list(dict.fromkeys(kind(a) for a in attempts))
    figure = Figure((SIZE[0], max(SIZE[1], 1.2 + 0.2 * len(rows))))
    begin = min(a.started for a in run.ledger.accounts) if run.ledger else 0.0
    unit, word = _unit(run.ledger.wall) if run.ledger else (1, "")
    ax = figure.add_subplot(title="attempts and snapshots", xlabel=f"{word} since the start" if run.ledger else "step")
    for a in attempts:
        span = (a.started - begin, a.until - begin) if run.ledger else (a.from_step, run.kept[a.attempt])
        left, right = (x / unit for x in span)
        ax.barh(
            rows.index(kind(a)),
            max(right - left, 0),
            left=left,
            height=0.6,
            color=colors.get(kind(a), GRID),
            alpha=0.75,
        )
        if run.ledger:
            ax.plot(right, rows.index(kind(a)), _end_mark(ends[a.attempt]), color=INK, markersize=5)
    at = [t - begin for a in run.ledger.accounts for _, t, _ in a.snapshots] if run.ledger else run.snapshots
    ticks = _thinned(np.array(sorted(at), dtype=float) / unit)
    ax.plot(ticks, [len(rows)] * len(ticks), "|", color=INK, markersize=9)
    ax.set_yticks(range(len(rows) + 1), [printable(row)[:28] for row in rows] + ["snapshots"])
    ax.set_ylim(len(rows) + 0.6, -0.6)
    ax.grid(axis="y", visible=False)
    return figure


def _end_mark(end: str | None) -> str:
    return {"finished": "o", "stopped": "s"}.get(end or "", "." if (end or "").startswith("no end") else "x")


def shares(run: Run) -> list[tuple[str, float, str]]:
    """(name, seconds, colour) of the ledger, the longest first."""
    spent = sorted((run.ledger.seconds if run.ledger else {}).items(), key=lambda item: -item[1])
    return [(LABELS.get(phase, phase), time, color(i)) for i, (phase, time) in enumerate(spent) if time > 0]


def _ledger(run: Run) -> Figure:
    figure = Figure(SIZE)
    ax = figure.add_subplot(title="where the time went", xlabel="% of the wall clock")
    parts, left = shares(run), 0.0
    whole = sum(time for _, time, _ in parts) or 1
    for phase, time, shade in parts:
        share = 100 * time / whole
        ax.barh(0, share, left=left, color=shade, height=0.8, label=f"{printable(phase)[:30]} {share:.1f} %")
        left += share
    ax.set(xlim=(0, 100), yticks=[])
    ax.grid(visible=False)
    figure.legend(loc="outside lower left", ncols=2)
    return figure


def svg(figure: Figure, name: str) -> str:
    """The picture as part of an HTML page, whose style says what its ink is."""
    out = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with _styled(salt=name):  # of its own, since the ids of two pictures in one page must differ
        figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = re.sub(r"<style[^>]*>.*?</style>|<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{name}">', text, count=1)
    return text.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")


def png(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _styled():
        figure.savefig(path, dpi=200, facecolor="white", metadata={"Software": None})
