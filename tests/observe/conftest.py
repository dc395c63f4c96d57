"""What several test files of this room share."""

import os
import pty
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest


@pytest.fixture
def in_terminal() -> Callable[..., tuple[int, str]]:
    """Runs a program in a terminal; returns its exit code, and what the terminal has got."""

    def run(command: list[str], **how: Any) -> tuple[int, str]:
        ours, theirs = pty.openpty()
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, **how) as child:
            os.close(theirs)
            said = b""
            with suppress(OSError):  # Linux: the other side is closed
                while part := os.read(ours, 65536):
                    said += part
            os.close(ours)
            return child.wait(200), said.decode()

    return run
