"""What is said to people. A run must not die because nobody listens any more (`| head`, a closed terminal).

All of it passes one filter: what others have written (a manifest, a file's name) commands no terminal.
"""

import os
import sys
from typing import TextIO

from mingpt.redact import escaped


def say(text: str) -> None:
    """One line, at once. In one write: the snapshots' thread has lines to say, too."""
    if not _write(sys.stdout, text):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the rest of this process's life)


def complain(text: str) -> None:
    """As `say`, to stderr."""
    if not _write(sys.stderr, text):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _write(stream: TextIO, text: str) -> bool:
    text = escaped(text)
    try:
        try:
            stream.write(f"{text}\n")
        except UnicodeEncodeError:  # the terminal lacks a character: no reason to fall silent for the rest of the run
            stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding) + "\n")
        stream.flush()
    except (OSError, ValueError):  # the pipe or the terminal is gone; closed
        return False
    return True
