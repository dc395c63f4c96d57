"""`mingpt sweep --on slurm` and `--on sky`: what they get, and once, also while another submits, after one that failed,
was killed or stopped, and where Slurm's answers say nothing.
"""

import errno
import fcntl
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mingpt.commands import sweep
from mingpt.sweep import local, remote
from mingpt.sweep.expand import expand
from paths_kit import ROOT
from sweep_kit import WAIT, has_opened, wait_for
from told import Told

# `refuse` has what it says as it fails, `answer` what it says else.
SBATCH = """
[ ! -e "$HERE/refuse" ] || { printf 47; cat "$HERE/refuse" >&2; exit 1; }
while [ -e "$HERE/hold" ]; do sleep 0.02; done
echo 17 >> "$HERE/queue"
[ ! -e "$HERE/kill" ] || kill -KILL $$
cat "$HERE/answer"
"""
# As Slurm's, it knows jobs of its own cluster only (`where`), and shows less if the user has set variables.
SQUEUE = """
[ ! -e "$HERE/fail" ] || { cat "$HERE/fail" >&2; exit 1; }
[ "$*" = "--noheader --jobs=17$(cat "$HERE/where")" ] && [ -z "$SLURM_CLUSTERS" ] || {
  echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }
[ -n "$SQUEUE_STATES" ] || cat "$HERE/queue"
"""
# SkyPilot 0.14.1's answer, but for the other fields. It may begin with text, and has 50 jobs only, without --all.
SKY = """
case "$*" in
"jobs queue "*) echo "✓ SkyPilot API server started."; echo '['
  case "$*" in *" --all"*) echo '  {"job_id": 1, "job_name": "sweep-seed-1", "status": "PENDING"},' ;; esac
  echo '  {"job_id": 51, "job_name": "sweep-seed-51", "status": "RECOVERING"}'; echo ']' ;;
esac
"""
SWEEP = ["experiment=synthetic", "seed=1,2", "--on=slurm"]
ON_SKY = ["experiment=shakespeare_char", "seed=1,2", "--on=sky", "--dir=s3://b/runs", "--launcher-args=--gpus L4:1"]
Start = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's folder, with stand-ins that note how they are called."""
    (tmp_path / "bin").mkdir()
    for name, script in {"sbatch": SBATCH, "squeue": SQUEUE, "sky": SKY}.items():
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho "$*" >> "$HERE/{name}.said"{script}')
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "answer").write_text("17;cluster\n")
    (tmp_path / "where").write_text(" --clusters=cluster")
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def start(project: Path) -> Start:
    """Starts the sweep as a shell does: in a process group of its own, which gets the terminal's Ctrl-C."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "mingpt.sweep", *SWEEP]
    return lambda: subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def submissions(folder: Path) -> list[str]:
    said = folder / "sbatch.said"
    return said.read_text().splitlines() if said.exists() else []


def test_what_slurm_gets(project: Path, capfd: pytest.CaptureFixture[str], told: Told) -> None:
    how = [*SWEEP, "--parallel", "1", "--launcher-args=--nodes=2 --time=10"]
    assert sweep.main([*how, "--dry-run"]) == 0
    out = capfd.readouterr().out
    told(out)
    assert sweep.main(how) == 0
    assert submissions(project) == [" ".join(shlex.split(out.splitlines()[-1])[1:])]
    assert Path("runs/sweep/trials.txt").read_text().splitlines() == [line[2:] for line in out.splitlines()[1:-1]]
    assert sweep.main(how) == 64
    told(capfd.readouterr().err)
    assert len(submissions(project)) == 1


def test_a_task_of_the_array_trains_the_trial_of_its_line(tmp_path: Path) -> None:
    trials = expand([], ["seed=1,2", "data.path='a b*\n$(echo \\'c\\')'"], "runs/s")
    (tmp_path / "trials.txt").write_text(remote.lines_of(trials))
    (tmp_path / "recipes/slurm").mkdir(parents=True)
    (tmp_path / "recipes/slurm/job.sh").write_text(
        'set -uf\ncomplain() { echo "$*" >&2; }\nlaunch_on_all() { printf "%s\\0" "$@"; }\n'
    )

    def task(number: str, arguments: Sequence[str] = ("trials.txt",)) -> tuple[int, list[str]]:
        variables = {**os.environ, "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_ARRAY_TASK_ID": number}
        command = ["bash", str(ROOT / remote.SCRIPT), *arguments]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600)
        return done.returncode, done.stdout.split("\0")[:-1]

    assert task("2") == (0, trials[1].arguments)
    assert task("3") == task("2", []) == (64, [])


def test_what_skypilot_gets(project: Path, capfd: pytest.CaptureFixture[str], told: Told) -> None:
    assert sweep.main([*ON_SKY, "--dry-run"]) == 0
    told(capfd.readouterr().out)
    remote.submit_jobs([["sky", "jobs", "launch", "-n", f"sweep-seed-{n}"] for n in (1, 5, 51)])
    assert (project / "sky.said").read_text().splitlines()[1:] == ["jobs launch -n sweep-seed-5"]


@pytest.mark.parametrize(
    "how", [[*ON_SKY, "--name=7"], [*ON_SKY[1:], "data.path='a b'"], [*ON_SKY, "--config-dir=/"]], ids=str
)
def test_what_skypilot_can_not_take(how: list[str], capfd: pytest.CaptureFixture[str], told: Told) -> None:
    assert sweep.main([*how, "--dry-run"]) == 64
    told(capfd.readouterr().err)


@pytest.mark.parametrize("how", [SWEEP, ON_SKY], ids=str)
def test_where_nothing_can_be_submitted_nothing_is_written(
    how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], told: Told
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # a bucket that is asked first would be told of
    assert sweep.main(how) == 64
    told("".join(capfd.readouterr()))
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_one_that_is_killed_as_it_submits_is_known_to_the_next(
    start: Start, project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "hold").touch()
    killed = start()
    wait_for(lambda: submissions(project))
    killed.kill()
    killed.wait(WAIT)
    following = start()  # sbatch goes on, and holds the lock
    wait_for(lambda: has_opened(following.pid, f"{project}/runs/sweep/sweep.lock"))
    (project / "hold").unlink()
    assert "job 17 " in following.communicate(timeout=WAIT)[1]
    (project / "queue").write_text("")  # the job has ended
    assert sweep.main(SWEEP) == 0
    assert "job 17: 2 trials" in capfd.readouterr().out
    assert len(submissions(project)) == 2


@pytest.mark.slow
def test_one_that_is_stopped_as_it_submits_is_known_to_the_next(start: Start, project: Path, told: Told) -> None:
    (project / "hold").touch()
    stopped = start()
    wait_for(lambda: submissions(project))
    os.killpg(stopped.pid, signal.SIGINT)
    told("".join(stopped.communicate(timeout=WAIT)))
    assert stopped.returncode == 75
    (project / "hold").unlink()
    wait_for(lambda: Path("runs/sweep/slurm-job").read_text())
    assert sweep.main(SWEEP) == 64
    assert len(submissions(project)) == 1


@pytest.mark.parametrize(
    ("file", "content", "again"),
    [
        ("refuse", b"no such partition: \xff", 0),
        ("kill", b"", 64),  # it has no number: perhaps it has submitted
        ("answer", b"warning: hello\nSubmitted batch job 17\n", 64),
        ("answer", b"", 64),
        ("answer", b"17;\n", 64),
        ("answer", b"17\n18\n", 64),
        ("answer", b"17;caf\xe9 \xff", 64),
    ],
)
def test_a_submission_that_goes_wrong(
    file: str, content: bytes, again: int, project: Path, capfd: pytest.CaptureFixture[str], told: Told
) -> None:
    (project / file).write_bytes(content)
    assert sweep.main(SWEEP) == 64
    told("".join(capfd.readouterr()))
    if file == "refuse":
        (project / file).unlink()
    assert sweep.main(SWEEP) == again
    assert len(submissions(project)) == (2 if again == 0 else 1)
    Path("runs/sweep/slurm-job").write_text("17;cluster\n")  # as the message says
    assert sweep.main(SWEEP) == 64
    assert "job 17 " in capfd.readouterr().err


def test_one_whose_sbatch_does_not_answer_lets_it_go_on(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], told: Told
) -> None:
    monkeypatch.setattr(remote, "SECONDS", 0.1)
    (project / "hold").touch()
    assert sweep.main(SWEEP) == 70
    told("".join(capfd.readouterr()))
    (project / "hold").unlink()
    wait_for(lambda: Path("runs/sweep/slurm-job").read_text())


@pytest.mark.parametrize(
    ("file", "content", "code"),
    [
        ("fail", b"slurm_load_jobs error: Unable to contact slurm controller\n", 70),
        ("fail", b"caf\xe9\n", 70),
        ("fail", b"", 70),
        ("fail", b"slurm_load_jobs error: Invalid job id specified\n", 0),  # it has forgotten the job
        ("queue", b"CLUSTER: cluster\n", 0),  # older Slurms say that without a header, too
        ("queue", b"17_1 caf\xe9\n", 64),
    ],
)
def test_what_squeue_knows_of_the_job_decides(
    file: str, content: bytes, code: int, project: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], told: Told,
) -> None:  # fmt: skip
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")  # the user's variables hide no job
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    assert sweep.main(SWEEP) == 0
    capfd.readouterr()
    (project / file).write_bytes(content)
    assert sweep.main(SWEEP) == code
    told(capfd.readouterr().err)
    assert len(submissions(project)) == (2 if code == 0 else 1)


def test_a_folder_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with local.locked(tmp_path):
        assert os.strerror(errno.ENOLCK) in capfd.readouterr().err
