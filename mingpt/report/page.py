"""The report as one HTML page, which loads nothing (see html.py): tables, and what charts.js draws above them."""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

import numpy as np

from mingpt.config.keys import leaves
from mingpt.observe.ledger import Account, duration, goodput_line
from mingpt.report.curves import color, curves, groups, shades
from mingpt.report.html import Html, document, table_of, text
from mingpt.report.reading import Run
from mingpt.report.runs import OTHER_PARTS, went
from mingpt.report.settings import changed, differing

SAMPLES = 20  # texts that are shown
RECENT = 50  # steps that the loss in the head is the mean of: that of one step is noise
# The charts are drawn into it.
CHARTS = '<div id="charts"><noscript><p>Without scripts, this page has its tables only.</p></noscript></div>'


def page(runs: Sequence[Run]) -> str:
    title = f"{len(runs)} runs" if len(runs) > 1 else runs[0].name[:40]
    return document(title, _one(runs[0]) if len(runs) == 1 else _several(runs), curves(runs))


def _several(runs: Sequence[Run]) -> str:
    """The table that compares runs: how each went, then the settings in which they differ."""
    settings = [run.settings for run in runs]
    values, keys = [dict(leaves(config)) for config in settings], differing(settings)
    shown = [went(run) for run in runs]
    head = ["run", "state", "step", "loss", "validation loss", "measured on", *keys]
    rows = [
        (
            Html(f"{_dot(color(i))}{text(run.name)}{_forked(run)}"),
            row["state"],
            f"{row['step']:,}",
            number(row["loss"]),
            number(row["val_loss"]),
            _share(row["val_tokens"], row["val_share"]),
            *(_value(of_run[key]) for key in keys),
        )
        for i, (run, row, of_run) in enumerate(zip(runs, shown, values, strict=True))
    ]
    measured_on = {(row["val_tokens"], row["val_share"]) for row in shown if row["val_loss"] is not None}
    warning = f"<p>{text(OTHER_PARTS, 400)}</p>" if len(measured_on) > 1 else ""
    table = f'<div class="card">{table_of(head, rows, "sortable")}</div>'
    return f"<h1>{len(runs)} runs</h1>{warning}{CHARTS}{table}"


def _forked(run: Run) -> Html:
    parent = run.past.parent
    return text(f", forked from {parent.run} after step {parent.step:,}") if parent else Html("")


def _one(run: Run) -> str:
    colors = shades(run)
    return "".join(
        (_head(run), CHARTS, _samples(run), _time(run), _evaluations(run), _attempts(run, colors), _config(run))
    )


def _dot(shade: str) -> Html:
    return Html(f'<i style="background:{shade}"></i>')


def number(value: object) -> str:
    """A loss, in four decimals; – where there is none, or it is not finite: JSON has null for that."""
    if not isinstance(value, (int, float)):
        return "–"
    return f"{value:.4f}" if abs(value) < 1e6 else f"{float(value):.3e}"


def _share(tokens: float | None, share: float | None) -> str:
    return "–" if tokens is None or share is None else f"{tokens:,.0f} tokens, {share:.1%} of the split"


def facts(run: Run) -> dict[str, str]:
    """The run in a few figures, those that are known."""
    row, validation, tokens = went(run), run.comparable, run.tokens
    good, last = np.isfinite(validation.values), run.attempts[-1] if run.attempts else None
    losses = zip(validation.values[good].tolist(), validation.steps[good].tolist(), strict=True)
    best = min(losses, default=None)  # of equal ones the first
    _, recent, *_ = groups(run.loss.steps[-RECENT:], run.loss.values[-RECENT:])
    planned = dict(leaves(run.settings)).get("train.max_steps")
    known = {
        "state": row["state"],
        "step": f"{row['step']:,}" + (f" of {planned:,}" if type(planned) is int else ""),
        f"loss, mean of {len(recent)} steps": number(float(np.mean(recent))) if len(recent) else None,
        "best validation loss": best and f"{best[0]:.4f} at step {best[1]:,.0f}",
        "validated on": None if row["val_share"] is None else _share(row["val_tokens"], row["val_share"]),
        "tokens seen": f"{tokens.values[-1]:,.0f}" if len(tokens.steps) else None,
        "parameters": f"{run.parameters:,}" if run.parameters else None,
        "attempts": f"{sum(a.end not in ('rewind', 'undo') for a in run.attempts)}",
        "machine": f"{last.processes} {last.host}".strip() if last and last.processes else None,
        "disk": f"{run.disk}'s alone: without that machine the run is lost" if run.disk else None,
        "wall time": duration(run.ledger.wall) if run.ledger else None,
        "cost": f"{cost:,.2f}" if run.ledger and (cost := run.ledger.cost()) is not None else None,
    }
    return {key: str(value) for key, value in known.items() if value is not None}


def _head(run: Run) -> str:
    shown = "".join(f"<div><dt>{text(key)}</dt><dd>{text(value)}</dd></div>" for key, value in facts(run).items())
    goodput = f"<p>{text(goodput_line(run.ledger), 400)}</p>" if run.ledger else ""
    last, parent = run.manifest, run.past.parent
    digest = f'<p class="soft">step {last.step:,} has the digest {text(last.digest)}</p>' if last else ""
    other = f", with other {', '.join(parent.keys)}" if parent and parent.keys else ""
    fork = f"<p>forked from {text(parent.run)} after step {parent.step:,}{text(other, 400)}</p>" if parent else ""
    title = f'<h1>{text(run.name)}</h1><p class="soft">{text(run.past.folder, 300)}</p>'
    return f'{title}{fork}<dl class="card">{shown}</dl>{goodput}{digest}'


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


def _time(run: Run) -> str:
    """One bar of all the time that attempts ran, and what its parts are."""
    if not run.ledger:
        return ""
    parts = [(name, spent) for name, spent in run.ledger.groups().items() if spent > 0]
    whole = sum(spent for _, spent in parts) or 1
    bar = "".join(f'<i style="flex:{spent / whole:.4f};background:{color(i)}"></i>' for i, (_, spent) in enumerate(parts))
    rows = [
        (Html(f"{_dot(color(i))}{text(name)}"), f"{spent:.1f} s" if spent < 60 else duration(spent), f"{spent / whole:.1%}")
        for i, (name, spent) in enumerate(parts)
    ]
    table = table_of(("phase", "time", "share"), rows)
    return f'<h2>Where the time went</h2><div class="card"><div class="bar">{bar}</div>{table}</div>'


def _evaluations(run: Run) -> str:
    """The newest first; only columns of which something is known."""
    found = [row for row in reversed(run.past.metrics) if "val_loss" in row]
    if not found:
        return ""
    names = [name for name in ("val_bits_per_byte", "val_accuracy") if any(name in row for row in found)]
    head = ("step", "validation loss", *(name.removeprefix("val_").replace("_", " ") for name in names), "measured on")
    rows = [
        (
            f"{row['step']:,}",
            *(number(row.get(name)) for name in ("val_loss", *names)),
            _share(*(value if isinstance(value := row.get(key), float) else None for key in ("val_tokens", "val_share"))),
        )
        for row in found
    ]
    return f'<h2>Evaluations</h2><div class="card">{table_of(head, rows, "sortable")}</div>'


def _lines(value: str) -> Html:
    return Html("\n".join(text(line, 10_000) for line in value[: 2**17].split("\n")))


def _samples(run: Run) -> str:
    """Texts that the run has written while it was training; the newest is open."""
    found = [row for row in reversed(run.past.metrics) if isinstance(row.get("sample"), str)][:SAMPLES]
    shown = "".join(
        f"<details class='card'{' open' * (row is found[0])}><summary>step {row['step']:,}</summary>"
        f"<pre>{_lines(row['sample'])}</pre></details>"
        for row in found
    )
    return f"<h2>Samples</h2>{shown}" if shown else ""


def _value(value: object) -> str:
    """A setting as YAML has it, more or less; a stranger's may be anything."""
    return "–" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _config(run: Run) -> str:
    """What differs from the defaults, and below it all of it."""
    rows = [(key, _value(value), _value(usual)) for key, value, usual in changed(run.settings)]
    table = f'<div class="card">{table_of(("key", "value", "default"), rows)}</div>' if rows else ""
    own = json.dumps(run.manifest.config, indent=1, ensure_ascii=False) if run.manifest else ""
    shown = _lines(run.config or own)
    whole = f"<details><summary>All keys</summary><pre class='card'>{shown}</pre></details>" if shown else ""
    return f"<h2>Settings that are not the defaults</h2>{table}{whole}" if shown else ""
