"""Processes that wait for whoever reads their output, so that a signal comes at the step that it was meant for."""

import fcntl
import os
import subprocess
from collections.abc import Sequence
from typing import Any

ONE_PAGE = 4096  # the smallest pipe


def start(command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
    """Start a command whose output, errors too, is the process's `stdout`. options: of subprocess.Popen.

    Its pipe has room for one write (pipe(7): packets of one page): whoever prints a line waits until the line before
    was read. With a common pipe a run of small steps may be over before its tenth line is read. Where there are no
    such pipes (macOS), it gets a common one.
    """
    if not hasattr(os, "O_DIRECT"):
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    reading, writing = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, ONE_PAGE)
    try:
        process = subprocess.Popen(command, stdout=writing, stderr=subprocess.STDOUT, text=True, **options)
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    process.stdout = os.fdopen(reading, errors="replace")
    return process
