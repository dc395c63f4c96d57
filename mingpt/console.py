"""Prints to stdout and stderr. A run must not end because a pipe or a terminal is closed (`| head`).

Control characters are escaped, since a line may contain text from a file (a manifest, a file's name).
"""

import os
import sys
from typing import TextIO

from mingpt.redact import escaped


def say(text: str) -> None:
    """Print to stdout and flush. In one write, since the snapshot writer's thread prints, too."""
    if not _write(sys.stdout, text):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open until the process ends)


def complain(text: str) -> None:
    """Print to stderr and flush."""
    if not _write(sys.stderr, text):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def counted(number: int, noun: str) -> str:
    """`1 process`, `2,000 processes`."""
    plural = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{plural * (number != 1)}"


def _write(stream: TextIO, text: str) -> bool:
    text = escaped(text)
    try:
        try:
            stream.write(f"{text}\n")
        except UnicodeEncodeError:  # the terminal's encoding lacks a character
            stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding) + "\n")
        stream.flush()
    except (OSError, ValueError):  # the other end is closed; the stream is closed
        return False
    return True
