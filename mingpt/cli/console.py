"""Prints to stdout and stderr. A run must not end because a pipe or a terminal is closed (`| head`).

Any other output that is lost (a full disk) is told on stderr, and the process does not end with 0: see `ended`.
Control characters are escaped, since a line may contain text from a file (a manifest, a file's name), and secrets are
blanked here and not where a message is made: all messages come here.
"""

import json
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from errno import EIO, EPIPE
from typing import Any, TextIO

from mingpt.cli.redact import redacted
from mingpt.errors import CRASHED, FINISHED

# Control characters (escape codes begin with one) except tab and line feed; line separators; direction marks.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

Say = Callable[[str], None]  # what prints a line, such as `say`

lost = False  # whether output could not be written


def say(text: str) -> None:
    """Print to stdout and flush. In one write, since the snapshot writer's thread prints, too."""
    put(f"{escaped(redacted(text))}\n")


def say_json(value: Any) -> None:
    """Print a document for programs, in one line."""
    # Before it is JSON: there a quote in a text is two characters, and a blanked value could take one along.
    put(f"{escaped(json.dumps(finite(redacted(value))))}\n")


def finite(value: Any) -> Any:
    """JSON has no NaN: a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def put(text: str) -> bool:
    """Write to stdout as it is, and flush. False: it can't be written, nor what follows."""
    global lost
    error = _write(sys.stdout, text)
    if error is not None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)
        if not _is_closed(error):
            lost = True
            complain(f"error: standard output can't be written: {error}: what follows is lost")
    return error is None


def complain(text: str) -> None:
    """Print to stderr and flush, as `say` does."""
    if _write(sys.stderr, f"{escaped(redacted(text))}\n") is not None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def counted(number: int, noun: str) -> str:
    """`1 process`, `2,000 processes`."""
    plural = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{plural * (number != 1)}"


def escaped(text: str) -> str:
    """The text with control characters escaped, so that foreign text in it can't control a terminal."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def as_lines(texts: Iterable[str]) -> str:
    """A page for a terminal or a log of texts that may be foreign: each stays one line."""
    return "\n".join(map(printable, texts))


def printable(text: str) -> str:
    """Foreign text as part of one line: control characters, line feeds and tabs are escaped."""
    return escaped(text).replace("\n", "\\n").replace("\t", "\\t")


def shortened(text: str, longest: int) -> str:
    """The text, with an ellipsis in place of what is beyond `longest` characters."""
    return text if len(text) <= longest else f"{text[:longest]}…"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, each cell as wide as the widest of its column."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def ended(code: int) -> int:
    """The code to end with, once all output is written: CRASHED in place of FINISHED if some of it is lost."""
    put("")
    return CRASHED if lost and code == FINISHED else code


def _write(stream: TextIO | None, text: str) -> OSError | ValueError | None:
    if stream is None:  # the process was started without it
        return ValueError("closed")
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:  # the terminal's encoding lacks a character
            stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
        stream.flush()
    except (OSError, ValueError) as error:
        return error
    return None


def _is_closed(error: OSError | ValueError) -> bool:
    """Whether nobody reads any more: the other end of a pipe is closed, a terminal is gone, the stream is closed."""
    if isinstance(error, OSError) and error.errno == EIO:
        return stat.S_ISCHR(os.fstat(1).st_mode)
    return isinstance(error, ValueError) or error.errno == EPIPE
