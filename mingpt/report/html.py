"""HTML pages that load nothing: no script, no font, no picture from elsewhere.

All text of a run's files goes through `text`, which blanks secrets; the page's own policy forbids scripts and every
request besides.
"""

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from mingpt.cli.console import printable, shortened
from mingpt.cli.redact import redacted

LONGEST = 120  # characters of a cell
MOST_ROWS = 200
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class Html(str):
    """Text that is HTML already."""


def text(value: object, longest: int = LONGEST) -> Html:
    if isinstance(value, Html):
        return value
    return Html(escape(shortened(printable(redacted(str(value))), longest)))


def table_of(head: Sequence[object], rows: Iterable[Sequence[object]]) -> Html:
    cells = [[text(cell) for cell in row] for row in rows]
    lines = ["".join(f"<td{' class=long' * (len(c) > 40)}>{c}</td>" for c in row) for row in cells]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines[:MOST_ROWS])
    more = f'<p class="soft">… and {len(lines) - MOST_ROWS:,} more</p>' if len(lines) > MOST_ROWS else ""
    names = "".join(f"<th>{text(name)}</th>" for name in head)
    return Html(f'<div class="wide"><table><tr>{names}</tr>\n{body}</table>{more}</div>')


def document(title: str, body: str) -> str:
    style = files("mingpt.report").joinpath("page.css").read_text()
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>\n{style}</style></head>\n<body>\n{body}\n</body></html>\n"
    )
