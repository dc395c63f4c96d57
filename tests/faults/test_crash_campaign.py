"""A short campaign of crashes; a long one is `make crash-campaign`, and docs/crash-campaign.md is the report of one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paths_kit import KITS

pytestmark = pytest.mark.slow


def test_a_few_crashes_change_nothing(tmp_path: Path) -> None:
    campaign, report = KITS / "crash_campaign.py", tmp_path / "report.md"
    done = subprocess.run(
        [sys.executable, campaign, "--kills", "4", "--seed", "5", "--report", report],
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    summary = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert summary["kills"] >= 4
    assert summary["by kind"]["boundary, process"] >= 1
    assert summary["by kind"]["boundary, server"] >= 1
    assert sum(summary["runs finished with the undisturbed digest"].values()) >= 1
    assert f"**{summary['kills']} kills, no violation**" in report.read_text()
