"""A short campaign of crashes; a long one is `make crash-campaign`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_six_crashes_change_nothing() -> None:
    campaign = Path(__file__).with_name("crash_campaign.py")
    done = subprocess.run(
        [sys.executable, campaign, "--kills", "6", "--seed", "3"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    summary = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert summary["kills"] >= 6
    assert summary["runs finished with the undisturbed digest"] >= 1
