"""Where things are: the repository, and what processes that tests start must find."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KITS = ROOT / "tests/kits"
CRASH_SITE = KITS / "crash_site"  # sitecustomize of processes that are to crash at a boundary
