"""benchmarks/gpu_check.sh to its end on a CPU: a mistake in it must not cost a GPU's time."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.kits.paths_kit import ROOT, ran

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def checked(out: Path, minutes: float) -> tuple[int, list[dict[str, object]], str]:
    """Its exit code, its results, and what it printed. Ours comes from the checkout, as on a machine without it."""
    command = ["bash", "benchmarks/gpu_check.sh", f"--minutes={minutes}", f"--out={out}"]
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = ran(command, cwd=ROOT, env=environment)
    lines = (out / "results.jsonl").read_text().splitlines()
    return done.returncode, [json.loads(line) for line in lines], done.stdout + done.stderr


def test_every_section_of_the_check_runs_to_its_end(tmp_path: Path) -> None:
    code, rows, said = checked(tmp_path, 20)
    assert code == 0, said
    assert [*dict.fromkeys(row["section"] for row in rows)] == [
        "machine", "speed", "bits", "models", "kill", "profile", "stall", "start"
    ]  # fmt: skip
    assert not [row for row in rows if row["what"] == "no time" or row.get("code")]
    assert [row["equal"] for row in rows if row["section"] in ("bits", "kill")] == [True, True]
    assert [row["equal"] for row in rows if row["section"] == "speed" and "equal" in row] == [True, True]
    assert False not in [row["equal"] for row in rows if row["section"] == "models"]
    [bits] = [row["digests"] for row in rows if row["section"] == "bits"]
    assert isinstance(bits, dict)
    assert {"2 processes", "3 processes"} < bits.keys()
    page = (tmp_path / "README.md").read_text()
    assert all(f"**{row['what']}**" in page for row in rows)
    assert "aten::" in (tmp_path / "kernels.txt").read_text()


def test_a_check_whose_time_is_over_says_what_it_left_out(tmp_path: Path) -> None:
    code, rows, _ = checked(tmp_path, 0.05)
    assert code == 0
    assert [row["section"] for row in rows] == [
        "machine", "speed", "bits", "models", "speed_large", "kill", "profile", "stall"
    ]  # fmt: skip
    assert {row["what"] for row in rows[1:]} == {"no time"}
