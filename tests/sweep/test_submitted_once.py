"""`mingpt sweep --on slurm` once more: while another submits, after one that failed, was killed or stopped, and where
Slurm's answers say nothing.
"""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mingpt.commands import sweep
from mingpt.sweep import local, remote
from paths_kit import ROOT
from sweep_kit import WAIT, has_opened, wait_for

# `refuse` has what it says as it fails, `answer` what it says else.
SBATCH = """#!/bin/sh
echo submits >> "$HERE/sbatch.said"
[ ! -e "$HERE/refuse" ] || { printf 47; cat "$HERE/refuse" >&2; exit 1; }
while [ -e "$HERE/hold" ]; do sleep 0.02; done
echo 17 >> "$HERE/queue"
[ ! -e "$HERE/kill" ] || kill -KILL $$
cat "$HERE/answer"
"""
# As Slurm's, it knows jobs of its own cluster only (`where`), and shows less if the user has set variables.
SQUEUE = """#!/bin/sh
[ ! -e "$HERE/fail" ] || { cat "$HERE/fail" >&2; exit 1; }
[ "$*" = "--noheader --jobs=17$(cat "$HERE/where")" ] && [ -z "$SLURM_CLUSTERS" ] || {
  echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }
[ -n "$SQUEUE_STATES" ] || cat "$HERE/queue"
"""
pytestmark = [pytest.mark.slow]

SWEEP = ["experiment=synthetic", "seed=1,2", "--on=slurm"]
REFUSED = (
    "error: runs/sweep: job 17 of this sweep is in Slurm's queue: wait, or end it: scancel --clusters=cluster 17\n"
)
Start = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project's folder, with stand-ins for sbatch and squeue."""
    (tmp_path / "bin").mkdir()
    for name, script in (("sbatch", SBATCH), ("squeue", SQUEUE)):
        (tmp_path / "bin" / name).write_text(script)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "answer").write_text("17;cluster\n")
    (tmp_path / "where").write_text(" --clusters=cluster")
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def start(slurm: None, tmp_path: Path) -> Start:
    """Starts the sweep as a shell does: in a process group of its own, which gets the terminal's Ctrl-C."""

    def sweep() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "mingpt.sweep", *SWEEP],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return sweep


def submissions(folder: Path) -> int:
    said = folder / "sbatch.said"
    return len(said.read_text().splitlines()) if said.exists() else 0


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
    (tmp_path / "refuse").write_bytes(b"no such partition: \xff")
    failed = start()
    said = "error: sbatch --parsable --job-name=sweep failed (1): no such partition: \ufffd\n"
    assert failed.communicate(timeout=WAIT) == ("", said)
    assert failed.returncode == 64
    assert sorted(os.listdir("runs/sweep")) == ["sweep.json", "sweep.lock", "trials.txt"]
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_that_is_stopped_as_it_submits_is_known_to_the_next(start: Start, tmp_path: Path, number: int) -> None:
    (tmp_path / "hold").touch()
    stopped = start()
    wait_for(lambda: submissions(tmp_path))
    os.killpg(stopped.pid, number)
    told = (
        "sbatch goes on, and notes its job's number in runs/sweep/slurm-job: the same command again reads it\n"
        "stopped on request: the same command again goes on\n"
    )
    assert stopped.communicate(timeout=WAIT) == ("", told)
    assert stopped.returncode == 75
    (tmp_path / "hold").unlink()
    assert start().communicate(timeout=WAIT) == ("", REFUSED)
    assert submissions(tmp_path) == 1


def test_one_whose_sbatch_does_not_answer_lets_it_go_on(
    slurm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "SECONDS", 0.1)
    (tmp_path / "hold").touch()
    assert sweep.main(SWEEP) == 70
    assert capfd.readouterr() == (
        "",
        "error: sbatch has not answered within 0 s, and goes on: it notes its job's number in runs/sweep/slurm-job: "
        "the same command again reads it\n",
    )
    (tmp_path / "hold").unlink()
    wait_for(lambda: Path("runs/sweep/slurm-job").read_text())


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            b"slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n",
            "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        ),
        (b"squeue: error: caf\xe9\n", "squeue: error: caf\ufffd"),
        (b"", "it said nothing"),
    ],
)
def test_one_that_squeue_knows_nothing_of_is_not_submitted_again(
    slurm: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], said: bytes, told: str
) -> None:
    assert sweep.main(SWEEP) == 0
    capfd.readouterr()
    (tmp_path / "fail").write_bytes(said)
    assert sweep.main(SWEEP) == 70
    assert capfd.readouterr() == (
        "",
        f"error: squeue --noheader --jobs=17 --clusters=cluster failed (1): {told}\n"
        "Nothing was submitted, since job 17 of this sweep may be in the queue: try again (or, if you know that it has "
        "ended, delete runs/sweep/slurm-job)\n",
    )
    (tmp_path / "fail").unlink()
    assert sweep.main(SWEEP) == 64
    assert capfd.readouterr() == ("", REFUSED)
    assert submissions(tmp_path) == 1


def test_one_that_squeue_has_forgotten_is_submitted_again(slurm: None, tmp_path: Path) -> None:
    assert sweep.main(SWEEP) == 0
    (tmp_path / "fail").write_text("slurm_load_jobs error: Invalid job id specified\n")
    assert sweep.main(SWEEP) == 0
    (tmp_path / "fail").unlink()
    (tmp_path / "queue").write_text("CLUSTER: cluster\n")  # older Slurms say that without a header, too
    assert sweep.main(SWEEP) == 0
    assert submissions(tmp_path) == 3


def test_the_user_s_variables_hide_no_job(
    slurm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "answer").write_text("17\n")
    (tmp_path / "where").write_text("")
    assert sweep.main(SWEEP) == 0
    capfd.readouterr()
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    (tmp_path / "queue").write_bytes(b"17_1 caf\xe9\n")
    assert sweep.main(SWEEP) == 64
    told = "error: runs/sweep: job 17 of this sweep is in Slurm's queue: wait, or end it: scancel 17\n"
    assert capfd.readouterr() == ("", told)


@pytest.mark.parametrize(
    ("answer", "read"),
    [
        (b"sbatch: warning: hello\nSubmitted batch job 17\n", r"'sbatch: warning: hello\nSubmitted batch job 17'"),
        (b"", "''"),
        (b"17;\n", "'17;'"),
        (b"17\n18\n", r"'17\n18'"),
        (b"17;caf\xe9 \xff", "'17;caf\ufffd \ufffd'"),
    ],
)
def test_one_whose_number_is_unknown_is_not_submitted_again(
    slurm: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], answer: bytes, read: str
) -> None:
    (tmp_path / "answer").write_bytes(answer)
    for _ in range(2):
        assert sweep.main(SWEEP) == 64
        assert capfd.readouterr() == ("", f"error: {unknown(read)}\n")
    assert submissions(tmp_path) == 1
    Path("runs/sweep/slurm-job").write_text("17;cluster\n")
    assert sweep.main(SWEEP) == 64
    assert capfd.readouterr() == ("", REFUSED)


def unknown(read: str) -> str:
    return (
        f"runs/sweep/slurm-job: {read} is no job's number, so this sweep may be in Slurm's queue: look there "
        "(squeue -u $USER, and --clusters if sbatch got it). If it is there, write its number, or NUMBER;CLUSTER, "
        "into the file, or scancel it and delete the file; else delete the file. Then start again"
    )


def test_one_whose_sbatch_was_killed_is_not_submitted_again(
    slurm: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kill").touch()
    for _ in range(2):
        assert sweep.main(SWEEP) == 64
        assert capfd.readouterr() == ("", "error: " + unknown("''") + "\n")
    assert submissions(tmp_path) == 1


def test_where_nothing_can_be_submitted_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sweep.main(SWEEP) == 64
    assert capfd.readouterr() == (
        "",
        "error: 2 problems:\n"
        "  1. sbatch is not there: run this where it is installed, or use --on local\n"
        "  2. recipes/slurm/sweep.sbatch is not there: run this in the project's folder\n",
    )
    assert os.listdir(tmp_path) == []
