"""A managed job that starts over and over: SkyPilot has no limit of number, and new machines no memory."""

from pathlib import Path

import pytest

from mingpt.cli.command import code_of
from mingpt.launch import starts
from mingpt.snapshot.store import Store
from tests.kits.snapshot_kit import save
from tests.kits.told import Told


def test_starts_without_a_new_snapshot_end_the_job(
    tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    run, limit = tmp_path / "run", "launch.max_attempts_without_progress=2"

    def start(job: str = "sky-1", *more: str) -> int:
        return code_of(lambda: starts.main([f"run.dir={run}", limit, "snapshot.hot_every_steps=0", *more], job))

    assert [start(), start(), start(), start()] == [0, 0, 64, 64]
    told(capsys.readouterr().err.splitlines()[0])
    assert start("sky-2") == 0  # launched again, by somebody who has corrected something
    assert [start(), start()] == [0, 0]
    save(Store(f"{run}/snapshots"), 5)
    assert [start(), start(), start()] == [0, 0, 64]  # at step 5
    assert start("sky-1", "launch.max_attempts_without_progress=3") == 0
    (file := run / starts.FILE).write_bytes(b"\xff" * 9)  # somebody's
    assert start() == 0
    assert file.read_bytes().endswith(b"sky-1 at step 5\n")
