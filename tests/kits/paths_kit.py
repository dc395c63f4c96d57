"""Where things are: the repository, and what processes that tests start must find; and what a program says."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
KITS = ROOT / "tests/kits"
CRASH_SITE = KITS / "crash_site"  # sitecustomize of processes that are to crash at a boundary


def ran(command: Sequence[object], **how: Any) -> "subprocess.CompletedProcess[str]":
    """A program that has ended, with its output; how: as subprocess.run has it."""
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **{"timeout": 1100} | how)
