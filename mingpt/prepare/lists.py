"""Lists of sources: `@LIST`, where LIST is a file or URL with one source a line."""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urljoin

from mingpt.errors import UserError
from mingpt.redact import printable, without_secrets
from mingpt.storage import EXTRAS, is_local, open_fs, place
from mingpt.webfile import is_web, read_stream

LONGEST = 64 << 20  # bytes of a list: a million lines


def expanded(sources: Sequence[str]) -> Iterator[str]:
    """The sources, with the lines of its list in place of each `@LIST`."""
    for source in sources:
        if source.startswith("@"):
            yield from _lines(source[1:])
        else:
            yield source


def _lines(url: str) -> Iterator[str]:
    shown = f"SOURCES=@{without_secrets(url)}"
    fs, path = open_fs(url, "SOURCES")
    with place("SOURCES", f"@{url}"):
        content = b"".join(read_stream(fs, path, LONGEST + 1)) if is_web(fs) else fs.cat_file(path, end=LONGEST + 1)
    if len(content) > LONGEST:
        raise UserError(f"{shown}: longer than {LONGEST} bytes: is this a list, one source a line?")
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{shown}: not UTF-8 at byte {error.start}: is this a list, one source a line?") from error
    found = [(number, text) for number, line in enumerate(lines, 1) if (text := line.strip()) and text[0] != "#"]
    if not found:
        raise UserError(f"{shown}: names no source: write one a line")
    for number, text in found:
        yield _resolved(text, fs, path if is_local(fs) else url, f"{shown} line {number}")


def _resolved(line: str, fs: Any, url: str, where: str) -> str:
    """The source that a line names. Where it is relative, its place is that of the list."""
    if is_local(fs):
        return line if "://" in line or line.startswith("~") else os.path.join(os.path.dirname(url), line)
    if is_web(fs):
        source = urljoin(url, line)
    else:
        source = line if "://" in line else f"{url.rpartition('/')[0]}/{line}"
    # Somebody else may have written this list: it can't lead to files of this machine.
    scheme = re.match(r"([a-z0-9]+)://", source)
    if not scheme or scheme[1] not in EXTRAS or "::" in source:
        raise UserError(
            f"{where}: {printable(str(without_secrets(line)))}: a list from elsewhere names files elsewhere"
        )
    return source
