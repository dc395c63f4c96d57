"""`python -m mingpt.launch.newest`: what a job of Slurm's asks before and after it trains."""

from pathlib import Path

import pytest

from mingpt.launch.newest import main
from mingpt.snapshot.elsewhere import Marker


def test_a_job_is_told_the_newest_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nproc-per-node=2", f"run.dir={tmp_path}/run"]) == 0
    assert capsys.readouterr().out == "0\n"
    Path(tmp_path, "run").mkdir()
    Marker("a" * 32, "another-node", 1, 40).write(f"{tmp_path}/run")
    assert main([f"run.dir={tmp_path}/run"]) == 0
    assert capsys.readouterr().out == "40\n"
