"""The report as one HTML page, which loads nothing (see html.py): tables, and what charts.js draws above them."""

import math
from collections.abc import Sequence

import numpy as np

from mingpt.config.keys import held_at
from mingpt.observe.ledger import Account, duration, goodput_line
from mingpt.report.curves import curves, groups
from mingpt.report.html import Html, document, table_of, text
from mingpt.report.reading import Run
from mingpt.report.runs import OTHER_PARTS, cells, measured_apart, moment, went, with_defaults, with_settings

SAMPLES = 20  # texts that are shown
MEASURED = {"val_loss": "validation loss", "val_bits_per_byte": "bits per byte", "val_accuracy": "accuracy"}
MEASURED_ON = "measured on (of the split)"
RECENT = 50  # steps that the loss in the head is the mean of: that of one step is noise
# The charts are drawn into it.
CHARTS = '<div id="charts"><noscript><p>Without scripts, this page has its tables only.</p></noscript></div>'


def page(runs: Sequence[Run]) -> str:
    title = f"{len(runs)} runs" if len(runs) > 1 else runs[0].name[:40]
    return document(title, _one(runs[0]) if len(runs) == 1 else _several(runs), curves(runs))


def _several(runs: Sequence[Run]) -> str:
    """The charts, and the table that compares runs: how each went, then the settings in which they differ."""
    found = with_settings([went(run) for run in runs])
    head, *rows = cells(found)
    for run, row in zip(runs, rows, strict=True):
        row[0] += _forked(run).partition(",")[0]  # the other keys are columns
    warning = f"<p>{text(OTHER_PARTS, 400)}</p>" if measured_apart(found) else ""
    table = f'<div class="card">{table_of(head, rows, "colored sortable")}</div>'
    return f"<h1>{len(runs)} runs</h1>{warning}{CHARTS}{table}"


def _forked(run: Run) -> str:
    if not (parent := run.past.parent):
        return ""
    other = f", with other {', '.join(parent.keys)}" if parent.keys else ""
    return f" from {parent.run}@{parent.step}{other}"


def _one(run: Run) -> str:
    pair = f'<div class="pair"><section>{_time(run)}</section><section>{_evaluations(run)}</section></div>'
    return "".join((_head(run), CHARTS, _samples(run), pair, _attempts(run), _config(run)))


def number(value: object) -> str:
    """A loss, in four decimals; – where there is none, or it is not finite: JSON has null for that."""
    if not isinstance(value, (int, float)):
        return "–"
    return f"{value:.4f}" if abs(value) < 1e6 else f"{float(value):.3e}"


def _share(tokens: object, share: object) -> str:
    known = isinstance(tokens, float) and isinstance(share, float)
    return f"{tokens:,.0f} tokens, {share:.1%}" if known else "–"


def facts(run: Run) -> dict[str, str]:
    """The run in a few figures, those that are known."""
    row, tokens = went(run), run.past.last_of("tokens_seen")
    last = run.attempts[-1] if run.attempts else None
    measured = ((row["val_loss"], row["step"]) for row in run.past.validations() if isinstance(row["val_loss"], float))
    best = min(measured, default=None)  # of equal ones the first
    _, recent, *_ = groups(run.loss.steps[-RECENT:], run.loss.values[-RECENT:])
    planned = held_at("train.max_steps", run.settings)
    known = {
        "state": row["state"],
        "step": f"{row['step']:,}" + (f" of {planned:,}" if type(planned) is int else ""),
        f"loss, mean of {len(recent)} steps": number(float(np.mean(recent))) if len(recent) else None,
        "best validation loss": best and f"{best[0]:.4f} at step {best[1]:,.0f}",
        MEASURED_ON: None if row["val_share"] is None else _share(row["val_tokens"], row["val_share"]),
        "tokens seen": f"{tokens:,}" if type(tokens) is int else None,
        "parameters": f"{run.parameters:,}" if run.parameters else None,
        "attempts": run.starts,
        "machine": f"{last.processes} {last.host}".strip() if last and last.processes else None,
        "disk": f"{run.disk}'s alone: without that machine the run is lost" if run.disk else None,
        "wall time": duration(run.ledger.wall) if run.ledger else None,
        "cost": f"{cost:,.2f}" if run.ledger and (cost := run.ledger.cost()) is not None else None,
    }
    return {key: str(value) for key, value in known.items() if value is not None}


def _head(run: Run) -> str:
    shown = "".join(f"<div><dt>{text(key)}</dt><dd>{text(value)}</dd></div>" for key, value in facts(run).items())
    goodput = f"<p>{text(goodput_line(run.ledger), 400)}</p>" if run.ledger else ""
    last = run.manifest
    digest = f'<p class="soft">step {last.step:,} has the digest {text(last.digest)}</p>' if last else ""
    title = f'<h1>{text(run.name)}</h1><p class="soft">{text(run.past.folder, 300)}{text(_forked(run), 400)}</p>'
    return f'{title}<dl class="card">{shown}</dl>{goodput}{digest}'


def _attempts(run: Run) -> str:
    def row(a: Account) -> tuple[object, ...]:
        kept = run.kept[a.attempt]
        steps = f"{a.from_step + 1:,} to {kept:,}" if kept > a.from_step else f"none, from {a.from_step:,}"
        spent = a.until - a.started
        lasted = duration(spent) if math.isfinite(spent) else "–"
        return a.attempt, steps, a.processes or "–", a.host or "–", moment(a.started) or "–", lasted, a.end or "–"

    head = ("attempt", "steps kept", "processes", "host", "started (UTC)", "time", "end")
    kept = f"Snapshots there: {text(', '.join(map(str, run.past.steps)), 300)}." if run.past.steps else ""
    table = table_of(head, map(row, reversed(run.attempts)))
    damaged = "".join(f"<p>{text(line)}</p>" for line in run.past.trace_damage.values())
    return f'<h2>Attempts and snapshots</h2><div class="card">{table}</div>{damaged}<p class="soft">{kept}</p>'


def _time(run: Run) -> str:
    """Over all attempts; charts.js draws it as one bar."""
    if not run.ledger:
        return ""
    rows, parts = list[tuple[str, ...]](), run.ledger.groups()
    whole = sum(parts.values()) or 1
    for name, spent in parts.items():
        if spent > 0:
            rows.append((name, f"{spent:.1f} s" if spent < 60 else duration(spent), f"{spent / whole:.1%}"))
    table = table_of(("phase", "time", "share"), rows, "colored bar")
    return f'<h2>Where the time went</h2><div class="card">{table}</div>'


def _evaluations(run: Run) -> str:
    """The newest first."""
    found = [row for row in reversed(run.past.metrics) if "val_loss" in row]
    if not found:
        return ""
    rows = [
        (
            f"{row['step']:,}",
            *(number(row.get(key)) for key in MEASURED),
            _share(row.get("val_tokens"), row.get("val_share")),
        )
        for row in found
    ]
    table = table_of(("step", *MEASURED.values(), MEASURED_ON), rows, "sortable")
    return f'<h2>Evaluations</h2><div class="card">{table}</div>'


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
    """What differs from the defaults, and below it all the rest."""
    rows: dict[bool, list[tuple[str, ...]]] = {False: [], True: []}
    for key, value, usual in with_defaults(run.settings):
        rows[value == usual].append((key, _value(value), _value(usual)))
    head = ("key", "value", "default")
    rest = f'<details class="card"><summary>Those that are</summary>{table_of(head, rows[True])}</details>'
    table = f'<div class="card">{table_of(head, rows[False])}</div>'
    return f"<h2>Settings that are not the defaults</h2>{table}{rest}" if any(rows.values()) else ""
