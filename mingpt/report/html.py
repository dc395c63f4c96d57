"""HTML pages that load nothing: scripts and styles lie in the page, and there is no font or picture from elsewhere.

All text of a run's files goes through `plain` or `text`, which blank secrets. The page's own policy forbids every
request, and each script but the page's own two, which it names by their hashes.
"""

import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files

from mingpt.cli.console import printable, shortened
from mingpt.cli.redact import redacted

LONGEST = 120  # characters of a cell
MOST_ROWS = 200
SCRIPTS, STYLES = ("uplot/uPlot.iife.min.js", "charts.js"), ("uplot/uPlot.min.css", "page.css")


class Html(str):
    """Text that is HTML already."""


def plain(value: object, longest: int = LONGEST) -> str:
    """Text for a script, which must not take it for HTML."""
    return shortened(printable(redacted(str(value))), longest)


def text(value: object, longest: int = LONGEST) -> Html:
    return value if isinstance(value, Html) else Html(escape(plain(value, longest)))


def table_of(head: Sequence[object], rows: Iterable[Sequence[object]], kind: str = "") -> Html:
    """kind: "sortable": a click on a column's name sorts it."""
    cells = [[text(cell) for cell in row] for row in rows]
    lines = ["".join(f"<td{' class=long' * (len(c) > 40)}>{c}</td>" for c in row) for row in cells]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines[:MOST_ROWS])
    more = f'<p class="soft">… and {len(lines) - MOST_ROWS:,} more</p>' if len(lines) > MOST_ROWS else ""
    names = "".join(f"<th>{text(name)}</th>" for name in head)
    return Html(f'<div class="wide"><table class="{kind}"><tr>{names}</tr>\n{body}</table>{more}</div>')


def document(title: str, body: str, curves: object) -> str:
    """The page. curves: what its charts draw, plain."""
    room = files("mingpt.report")
    style = "\n".join(room.joinpath(name).read_text("utf-8") for name in STYLES)
    scripts = [room.joinpath(name).read_text("utf-8") for name in SCRIPTS]
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}"
    # Within a script only `<` could end it, whatever a run's name is.
    numbers = json.dumps(curves, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}</style>\n"
        f"<!-- uPlot: {room.joinpath('uplot/LICENSE').read_text('utf-8')} --></head>\n<body>\n{body}\n"
        f'<script type="application/json" id="curves">{numbers}</script>\n'
        f"{''.join(f'<script>{script}</script>' for script in scripts)}\n</body></html>\n"
    )
