"""`mingpt sweep --on slurm` once more: while another submits, after one that failed, after one that was killed."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from mingpt.sweep import local
from paths_kit import ROOT
from sweep_kit import WAIT, wait_for

SBATCH = """#!/bin/sh
echo submits >> "$HERE/sbatch.said"
[ ! -e "$HERE/refuse" ] || { echo 'Batch job submission failed: no such partition' >&2; exit 1; }
while [ -e "$HERE/hold" ]; do sleep 0.02; done
echo 17 >> "$HERE/queue"
echo '17;cluster'
"""
SQUEUE = """#!/bin/sh
[ "$2" != --jobs=17 ] || cat "$HERE/queue"
"""
pytestmark = [pytest.mark.slow]

REFUSED = "job 17 of this sweep is in Slurm's queue: wait, or scancel 17"
Start = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts the sweep, with stand-ins for sbatch and squeue."""
    (tmp_path / "bin").mkdir()
    for name, script in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def sweep() -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "mingpt.sweep", "experiment=synthetic", "seed=1,2", "--on=slurm"]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return sweep


def submissions(folder: Path) -> int:
    said = folder / "sbatch.said"
    return len(said.read_text().splitlines()) if said.exists() else 0


def has_opened(pid: int, file: str) -> bool:
    with suppress(OSError):
        return any(os.readlink(path) == file for path in Path(f"/proc/{pid}/fd").iterdir())
    return False


def test_two_that_start_at_once_submit_one_array(start: Start, tmp_path: Path) -> None:
    lock = str(tmp_path / "runs/sweep/sweep.lock")
    (tmp_path / "hold").touch()
    both = [start(), start()]
    wait_for(lambda: submissions(tmp_path))
    for process in both:  # one waits, while the other submits
        wait_for(partial(has_opened, process.pid, lock))
    (tmp_path / "hold").unlink()
    (_, one), (_, other) = (process.communicate(timeout=WAIT) for process in both)
    assert sorted(process.returncode for process in both) == [0, 64], one + other
    assert REFUSED in one + other
    assert submissions(tmp_path) == 1


def test_one_whose_submission_failed_can_be_started_again(start: Start, tmp_path: Path) -> None:
    (tmp_path / "refuse").touch()
    failed = start()
    assert "no such partition" in failed.communicate(timeout=WAIT)[1]
    assert failed.returncode == 64
    (tmp_path / "refuse").unlink()
    again = start()
    assert "job 17: 2 trials" in again.communicate(timeout=WAIT)[0]
    assert submissions(tmp_path) == 2


def test_one_that_is_killed_as_it_submits_is_known_to_the_next(start: Start, tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    killed = start()
    wait_for(lambda: submissions(tmp_path))
    killed.kill()
    killed.wait(WAIT)
    following = start()  # sbatch goes on
    with pytest.raises(subprocess.TimeoutExpired):
        following.wait(4)
    (tmp_path / "hold").unlink()
    assert REFUSED in following.communicate(timeout=WAIT)[1]
    (tmp_path / "queue").write_text("")  # the job has ended
    again = start()
    assert "job 17: 2 trials" in again.communicate(timeout=WAIT)[0]
    assert submissions(tmp_path) == 2


def test_a_folder_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with local.locked(tmp_path):
        told = capfd.readouterr().err
    assert told == "No locks available: this file system has no locks, so do not start this sweep twice at a time\n"
