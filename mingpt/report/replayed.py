"""What `mingpt replay` has found, as a page in the style of the report."""

import math
from collections.abc import Mapping
from typing import Any

from mingpt.report.html import Html, document, table_of, text

LONGEST = 1000


def page(shown: Mapping[str, Any]) -> str:
    verdict = f'<p class="card">{text(shown["verdict"], LONGEST)}</p>'
    notes = "".join(f'<p class="soft">{text(note, LONGEST)}</p>' for note in shown["notes"])
    head = f'<h1>Step {shown["step"]:,}</h1><p class="soft">{text(shown["run"], 300)}</p>{verdict}{notes}'
    body = [head, _closeup(shown["as_it_was"])]
    if "changed" in shown:
        body += [f"<h1>Changed: {text(shown['change_text'], LONGEST)}</h1>", _closeup(shown["changed"])]
    if shown["then"]:
        keys = ("step", "loss", "recorded_loss", "grad_norm", "recorded_grad_norm")
        after = [[_number(row[key]) for key in keys] for row in shown["then"]]
        names = ("step", "loss now", "recorded", "gradient norm now", "recorded")
        body.append(f"<h2>What follows</h2>{_card(table_of(names, after))}")
    names = ("step", "attempt", "loss", "gradient norm", "bits")
    steps = [
        (r["step"], r["attempt"], _number(r["loss"]), _number(r["grad_norm"]), BITS[r["same"]]) for r in shown["steps"]
    ]
    body.append(f"<h2>Steps computed again</h2>{_card(table_of(names, steps))}")
    return document(f"step {shown['step']}", "".join(body))


BITS = {True: "same", False: "OTHER", None: "not recorded"}


def _closeup(seen: Mapping[str, Any]) -> str:
    figures = {
        "loss": _number(seen["loss"]),
        "gradient norm": _number(seen["grad_norm"]),
        "scaled by (clipping)": _number(seen["clip_factor"]),
        "learning rate": f"{seen['lr']:.4g}",
        "targets": f"{seen['targets']:,.0f}",
        "skipped": "yes" if seen["skipped"] else "no",
    }
    facts = "".join(f"<div><dt>{text(key)}</dt><dd>{text(value)}</dd></div>" for key, value in figures.items())
    keys = ("gradient", "update", "ratio", "activation")
    rows = [
        (layer["name"], *("–" if math.isnan(layer[key]) else f"{layer[key]:.4g}" for key in keys))
        for layer in seen["layers"]
    ]
    head = ("layer", "gradient norm", "update", "of the weights", "largest activation")
    out = [f'<dl class="card">{facts}</dl><h2>Layers</h2>{_card(table_of(head, rows))}']
    for title in ("worst", "best"):
        if seen[title]:
            found = [(_number(s["loss"]), s["position"], s["number"], _sample(s)) for s in seen[title]]
            names = ("loss", "position", "number", "sample")
            out.append(f"<h2>{title.capitalize()} samples</h2>{_card(table_of(names, found))}")
    return "".join(out)


def _sample(sample: Mapping[str, Any]) -> Html:
    picture = (
        f'<img alt="" style="max-width:8rem" src="data:image/png;base64,{sample["png"]}">' if "png" in sample else ""
    )
    return Html(f"{picture}{text(sample['text'], LONGEST)}")


def _card(content: Html) -> str:
    return f'<div class="card">{content}</div>'


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:.6g}"
