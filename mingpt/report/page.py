"""The report as one HTML page, which loads nothing (see html.py)."""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

import numpy as np

from mingpt.observe.ledger import Account, duration, goodput_line
from mingpt.report.figures import Band, Line, chart, color
from mingpt.report.html import Html, document, table_of, text
from mingpt.report.reading import Run
from mingpt.report.runs import OTHER_PARTS

SAMPLES = 20  # texts that are shown
MARKS = 200  # bands of attempts that are drawn


def page(runs: Sequence[Run]) -> str:
    title = ", ".join(run.name[:40] for run in runs)
    if len(runs) == 1:
        return document(title, _one(runs[0]))
    names = [Html(f"{_dot(color(i))}{i + 1}: {text(run.name)}") for i, run in enumerate(runs)]
    known = [facts(run) for run in runs]
    columns = list(dict.fromkeys(key for of_run in known for key in of_run))
    rows = [(name, *(of_run.get(c, "–") for c in columns)) for name, of_run in zip(names, known, strict=True)]
    lines = [Line(f"{i + 1}: {run.name}", run.loss, color(i)) for i, run in enumerate(runs)]
    lines += [Line("", run.curve("val_loss"), color(i), marks=True) for i, run in enumerate(runs)]
    table, losses = table_of(["run", *columns], rows), chart("loss (dots: validation)", lines)
    others = len({run.past.validated_on for run in runs if run.past.validations()}) > 1
    warning = f"<p>{text(OTHER_PARTS, 400)}</p>" if others else ""
    return document(title, f"<h1>{len(runs)} runs</h1>{table}{warning}{losses}")


def _one(run: Run) -> str:
    kinds = dict.fromkeys(a.processes for a in run.attempts if a.processes)
    colors = {name: color(i + 1) for i, name in enumerate(kinds)}
    bands = [Band(a.from_step, run.kept[a.attempt], colors.get(a.processes, color(7))) for a in run.on_line[-MARKS:]]
    validation = run.curve("val_loss")
    curves = [Line("training", run.loss, color(0))]
    curves += [Line("validation", validation, color(3), marks=True)] if len(validation.steps) else []
    charts = (
        chart("loss", curves, bands),
        chart("learning rate", [Line("", run.curve("lr"), color(0))], floor=True),
        chart("tokens/s", [Line("", run.curve("tokens_per_second"), color(0))], bands, floor=True),
    )
    legend = " ".join(f"{_dot(shade)}{text(name, 60)}" for name, shade in colors.items())
    parts = (
        _head(run),
        f'<div class="grid">{"".join(charts)}</div><p class="soft">{legend}</p>',
        _samples(run),
        _ledger(run),
        _attempts(run, colors),
        _config(run),
    )
    return "".join(parts)


def _dot(shade: str) -> Html:
    return Html(f'<i style="background:{shade}"></i>')


def number(value: object) -> str:
    """A loss: four decimals, also of NaN; JSON's null stands for that."""
    if value is None:
        return "not finite"
    return (f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3e}") if isinstance(value, float) else str(value)


def facts(run: Run) -> dict[str, str]:
    """The run in a few figures, those that are known."""
    validation = run.comparable
    good = np.isfinite(validation.values)
    tokens, share = run.past.validated_on
    losses = zip(validation.values[good].tolist(), validation.steps[good].tolist(), strict=True)
    best = min(losses, default=None)  # of equal ones the first
    last = run.attempts[-1] if run.attempts else None
    found = {
        "parameters": f"{run.parameters:,}" if run.parameters else None,
        "step": f"{run.last_step:,}",
        "loss": None if run.loss.last is None else number(run.loss.last),
        "best validation loss": best and f"{best[0]:.4f} (step {best[1]:,.0f})",
        "validated on": None if tokens is None or share is None else f"{tokens:,.0f} tokens, {share:.1%} of the split",
        "attempts": f"{sum(a.end not in ('rewind', 'undo') for a in run.attempts)}",
        "machine": f"{last.processes} {last.host}".strip() if last and last.processes else None,
        "disk": f"{run.disk}'s alone: without that machine the run is lost" if run.disk else None,
        "wall time": duration(run.ledger.wall) if run.ledger else None,
        "cost": f"{cost:,.2f}" if run.ledger and (cost := run.ledger.cost()) is not None else None,
    }
    return {key: str(value) for key, value in found.items() if value is not None}


def _head(run: Run) -> str:
    shown = "".join(f"<div><dt>{text(key)}</dt><dd>{text(value)}</dd></div>" for key, value in facts(run).items())
    goodput = f"<p>{text(goodput_line(run.ledger), 400)}</p>" if run.ledger else ""
    last, parent = run.manifest, run.past.parent
    digest = f'<p class="soft">step {last.step:,} has the digest {text(last.digest)}</p>' if last else ""
    other = f", with other {', '.join(parent.keys)}" if parent and parent.keys else ""
    fork = f"<p>forked from {text(parent.run)} after step {parent.step:,}{text(other, 400)}</p>" if parent else ""
    title = f'<h1>{text(run.name)}</h1><p class="soft">{text(run.past.folder, 300)}</p>'
    return f'{title}{fork}{goodput}<dl class="card">{shown}</dl>{digest}'


def _moment(at: float) -> str:
    try:
        return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # unknown, or no year
        return "–"


def _attempts(run: Run, colors: Mapping[str, str]) -> str:
    def row(a: Account) -> tuple[object, ...]:
        where = Html(f"{_dot(colors[a.processes])}{text(a.processes)}") if a.processes else "–"
        kept = run.kept[a.attempt]
        steps = f"{a.from_step + 1:,} to {kept:,}" if kept > a.from_step else f"none, from {a.from_step:,}"
        spent = a.until - a.started
        lasted = duration(spent) if math.isfinite(spent) else "–"
        return a.attempt, steps, where, a.host or "–", _moment(a.started), lasted, a.end or "–"

    head = ("attempt", "steps kept", "processes", "host", "started (UTC)", "time", "end")
    kept = f"Snapshots there: {text(', '.join(map(str, run.past.steps)), 300)}." if run.past.steps else ""
    table = table_of(head, map(row, reversed(run.attempts)))
    damaged = "".join(f"<p>{text(line)}</p>" for line in run.past.trace_damage.values())
    return f'<h2>Attempts and snapshots</h2><div class="card">{table}</div>{damaged}<p class="soft">{kept}</p>'


def _ledger(run: Run) -> str:
    if not run.ledger:
        return ""
    parts = sorted(run.ledger.groups().items(), key=lambda part: -part[1])
    whole = sum(spent for _, spent in parts) or 1
    rows = [
        (
            phase,
            f"{spent:.1f} s" if spent < 60 else duration(spent),
            Html(f'<i class="bar" style="width:{8 * spent / whole:.2f}em"></i>{100 * spent / whole:.1f} %'),
        )
        for phase, spent in parts
        if spent > 0
    ]
    return f'<h2>Where the time went</h2><div class="card">{table_of(("phase", "time", "share"), rows)}</div>'


def _lines(value: str) -> Html:
    return Html("\n".join(text(line, 10_000) for line in value[: 2**17].split("\n")))


def _samples(run: Run) -> str:
    """Texts that the run has written while it was training, the newest first."""
    found = [row for row in reversed(run.past.metrics) if isinstance(row.get("sample"), str)][:SAMPLES]
    rows = [(row["step"], Html(f"<pre>{_lines(row['sample'])}</pre>")) for row in found]
    return f'<h2>Samples</h2><div class="card">{table_of(("step", "text"), rows)}</div>' if rows else ""


def _config(run: Run) -> str:
    own = json.dumps(run.manifest.config, indent=1, ensure_ascii=False) if run.manifest else ""
    shown = _lines(run.config or own)
    return f"<details><summary>Config</summary><pre class='card'>{shown}</pre></details>" if shown else ""
