"""The report as one HTML page, which loads nothing (see html.py)."""

import json
import math
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from matplotlib.figure import Figure

from mingpt.observe.ledger import Account, duration, goodput_line
from mingpt.redact import without_secrets
from mingpt.report.bits import equality
from mingpt.report.figures import color, kind, kinds, shares, svg
from mingpt.report.html import Html, document, table_of, text
from mingpt.report.reading import Run
from mingpt.snapshot.forking import Parent

MOST_KEYS = 200
PLACES = {"run.name", "run.dir", "snapshot.dir"}  # of each run its own
TABS = ("steps", "tokens", "time")


def page(runs: Sequence[Run], drawn: Mapping[str, Figure], samples: Sequence[str | bytes | None]) -> str:
    title = ", ".join(run.name[:40] for run in runs)
    shown = {name: f'<figure class="card">{svg(figure, name)}</figure>' for name, figure in drawn.items()}
    several, sections = len(runs) > 1, list[str]()
    for i, (run, sample) in enumerate(zip(runs, samples, strict=True), 1):
        last = f"-{i}" if several else ""
        own = "".join(shown.get(f"{name}{last}", "") for name in ("components", "attempts", "ledger"))
        cards = f'<div class="grid">{own if several else _curves(shown) + own}</div>{_legend(run, kinds(runs))}'
        rest = (_attempts(run, kinds(runs)), _ledger(run), _skipped(run), _numerics(run), _sample(sample), _config(run))
        sections.append(_head(run, f"{_dot(color(i - 1))}{i}: " if several else "") + cards + "".join(rest))
    if several:
        note = '<p class="soft">Dashed: validation loss.</p>'
        sections.insert(0, f'{_comparison(runs)}<h2>Curves</h2><div class="grid">{_curves(shown)}</div>{note}')
    return document(title, "".join(sections))


def _dot(shade: str) -> Html:
    return Html(f'<i style="background:{shade}"></i>')


def number(value: object) -> str:
    """A loss: four decimals, also of NaN; JSON's null stands for that."""
    if value is None:
        return "not finite"
    return (f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3e}") if isinstance(value, float) else str(value)


def facts(run: Run) -> dict[str, str]:
    """The run in a few figures, those that are known."""
    losses = {"loss": run.loss.last, "validation loss": run.curve("val_loss").last}
    found = {
        "step": f"{run.last_step:,}",
        **{key: number(value) for key, value in losses.items() if value is not None},
        "attempts": f"{sum(a.end not in ('rewind', 'undo') for a in run.attempts)}",
        "wall time": duration(run.ledger.wall) if run.ledger else None,
        "cost": f"{cost:,.2f}" if run.ledger and (cost := run.ledger.cost()) is not None else None,
        "digest": run.manifest.digest[:16] if run.manifest else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _head(run: Run, mark: str) -> str:
    known = [(key, value) for key, value in facts(run).items() if key != "digest"]
    shown = "".join(f"<div><dt>{text(key)}</dt><dd>{text(value)}</dd></div>" for key, value in known)
    goodput = f"<p>{text(goodput_line(run.ledger), 400)}</p>" if run.ledger else ""
    last = run.manifest
    digest = f'<p class="soft">step {last.step:,} has the digest {text(last.digest)}</p>' if last else ""
    from_run = (
        f"<p>forked from {text(p.run)} after step {p.step:,}{text(_with(p), 400)}</p>" if (p := run.parent) else ""
    )
    title = f'<h1>{mark}{text(run.name)}</h1><p class="soft">{text(run.url, 300)}</p>'
    return f'{title}{from_run}{goodput}<dl class="card">{shown}</dl>{digest}'


def _with(parent: Parent) -> str:
    return f", with other {', '.join(parent.keys)}" if parent.keys else ""


def _comparison(runs: Sequence[Run]) -> str:
    columns = list(dict.fromkeys(key for run in runs for key in facts(run)))
    rows = [
        (Html(f"{_dot(color(i))}{i + 1}: {text(run.name)}"), *(facts(run).get(c, "–") for c in columns))
        for i, run in enumerate(runs)
    ]
    keys = different_keys(runs)
    names = [Html(f"{_dot(color(i))}{i + 1}: {text(run.name)}") for i, run in enumerate(runs)]
    lines = [(key, *values) for key, values in list(keys.items())[:MOST_KEYS]]
    table = table_of(["key", *names], lines) if lines else "<p>None, as far as the snapshots tell.</p>"
    return (
        f"<h1>{len(runs)} runs</h1>{table_of(['run', *columns], rows)}"
        f"<h2>Keys that differ</h2><div class='card'>{table}</div>"
    )


def different_keys(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The values of each key that is not the same in all runs, as the newest snapshots have them."""
    configs = [dict(_flat(without_secrets(run.manifest.config))) if run.manifest else {} for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if key not in PLACES)
    values = {key: [config.get(key, "–") for config in configs] for key in keys}
    return {key: found for key, found in values.items() if len({*found}) > 1}


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _curves(shown: Mapping[str, str]) -> str:
    """The curves over steps, tokens or time: what the page's style shows of the loss is what its radio button says."""
    tabs = "".join(
        f'<input type="radio" name="axis" id="by-{tab}"{" checked" * (tab == TABS[0])}>'
        f'<label for="by-{tab}">{tab}</label>'
        for tab in TABS
    )
    loss = "".join(shown[f"loss-{tab}"] for tab in TABS)
    others = "".join(shown[name] for name in ("learning-rate", "gradient-norm", "tokens-per-second"))
    return f'<div class="card tabs">{tabs}{loss}</div>{others}'


def _legend(run: Run, colors: Mapping[str, str]) -> str:
    own = dict.fromkeys(name for a in run.attempts if (name := kind(a)))
    marks = "● finished, ■ stopped, × killed or failed" if run.ledger else ""
    return f'<p class="soft">{" ".join(f"{_dot(colors[name])}{text(name, 60)}" for name in own)} {marks}</p>'


def _moment(at: float) -> str:
    try:
        return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):  # unknown, or no year
        return "–"


def _attempts(run: Run, colors: Mapping[str, str]) -> str:
    def row(a: Account) -> tuple[object, ...]:
        where = Html(f"{_dot(colors[kind(a)])}{text(kind(a))}") if kind(a) else "–"
        kept = run.kept.get(a.attempt, 0)
        steps = f"{a.from_step + 1:,} to {kept:,}" if kept > a.from_step else f"none, from {a.from_step:,}"
        spent = a.until - a.started
        lasted = duration(spent) if math.isfinite(spent) else "–"
        return a.attempt, steps, where, a.host or "–", _moment(a.started), lasted, a.end or "–"

    head = ("attempt", "steps kept", "processes", "host", "started (UTC)", "time", "end")
    kept = f"Snapshots there: {text(', '.join(map(str, sorted(run.snapshots))), 300)}." if run.snapshots else ""
    table = table_of(head, map(row, reversed(run.attempts)))
    return f'<h2>Attempts and snapshots</h2><div class="card">{table}</div><p class="soft">{kept}</p>'


def _ledger(run: Run) -> str:
    parts = shares(run)
    if not parts:
        return '<h2>Ledger</h2><p class="soft">This run has none.</p>'
    whole = sum(spent for _, spent, _ in parts)
    rows = [
        (Html(f"{_dot(c)}{text(p)}"), f"{s:.1f} s" if s < 60 else duration(s), f"{100 * s / whole:.2f} %")
        for p, s, c in parts
    ]
    return f'<h2>Ledger</h2><div class="card">{table_of(("phase", "time", "share"), rows)}</div>'


def _skipped(run: Run) -> str:
    skipped = [found for found in run.rows if "skipped" in found]
    if not skipped:
        return ""

    def row(found: Mapping[str, Any]) -> tuple[object, ...]:
        bad = found["skipped"] if isinstance(found["skipped"], dict) else {}
        why = "spike" if bad.get("spike") else "not finite"
        figures = number(found.get("loss")), number(found.get("grad_norm"))
        return found["step"], why, *figures, bad.get("microbatches", "–"), bad.get("samples", "–")

    head = ("step", "why", "loss", "gradient norm", "microbatches", "samples")
    return f'<h2>Skipped steps</h2><div class="card">{table_of(head, map(row, skipped))}</div>'


def _numerics(run: Run) -> str:
    lines = "".join(f"<p>{text(line, 2000)}</p>" for line in [*equality(run.manifest), run.twice] if line)
    fingerprint = dict(_flat(run.manifest.fingerprint)) if run.manifest else {}
    table = f"<details><summary>Fingerprint</summary>{table_of(('key', 'value'), fingerprint.items())}</details>"
    return f"<h2>Numerics</h2>{lines}{table if fingerprint else ''}"


def _sample(sample: str | bytes | None) -> str:
    if sample is None:
        return ""
    if isinstance(sample, bytes):
        return f'<h2>Sample</h2><img alt="" src="data:image/png;base64,{b64encode(sample).decode()}">'
    return f'<h2>Sample</h2><pre class="card">{_block(sample)}</pre>'


def _block(content: str) -> Html:
    return Html("\n".join(text(line, 10_000) for line in content.split("\n")))


def _config(run: Run) -> str:
    own = json.dumps(without_secrets(run.manifest.config), indent=1, ensure_ascii=False) if run.manifest else ""
    shown = run.config or own[: 2**17]
    return f"<details><summary>Config</summary><pre class='card'>{_block(shown)}</pre></details>" if shown else ""
