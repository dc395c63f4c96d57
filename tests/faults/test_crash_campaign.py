"""A short story of crashes; a long campaign is `make crash-campaign`, docs/faults.md is the report of one."""

import json
import sys

import pytest

from tests.kits.crash_plan import STORY
from tests.kits.paths_kit import ROOT, ran

pytestmark = pytest.mark.slow


def test_a_few_crashes_change_nothing() -> None:
    """On a disk and in a bucket; of a trainer, a launcher and the store; by one process and by two."""
    done = ran([sys.executable, "-m", "tests.kits.crash_campaign", "--kills=0", "--seed=5"], cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    summary = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert {f"{crash}, {storage}" for storage, crash in STORY} <= summary["crashes"].keys()
    assert summary["runs finished with the undisturbed digest"].keys() == {"disk", "bucket"}
    assert len(summary["starts by processes"]) > 1
