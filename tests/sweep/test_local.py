"""What a sweep on this machine does with trials that fail and with requests to stop. Trials are stand-ins."""

import signal
from pathlib import Path

import pytest

from mingpt.sweep import local
from sweep_kit import Sweeps, meanwhile, wait_for


def attempts(folder: Path, name: str) -> int:
    return len(list((folder / "sweep" / name / "metrics").glob("*")))


def test_a_trial_that_fails_ends_no_other_and_the_exit_code_says_so(
    sweeps: Sweeps, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweeps("seed=1,2,3", "--parallel=2", seed_1="fail") == 64
    assert "seed-1: failed: a user error (64); see seed-1.log" in capfd.readouterr().err
    assert [attempts(tmp_path, f"seed-{n}") for n in (1, 2, 3)] == [0, 1, 1]
    assert sweeps("seed=1,2,3", "--parallel=2", seed_1="crash") == 70
    assert sweeps("seed=1,2,3") == 0
    assert [attempts(tmp_path, f"seed-{n}") for n in (1, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_stop_stops_the_trials_and_the_next_start_finishes_them(
    sweeps: Sweeps, tmp_path: Path, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    meanwhile(lambda: wait_for(lambda: attempts(tmp_path, "seed-1") and attempts(tmp_path, "seed-2")), number)
    assert sweeps("seed=1,2,3", "--parallel=2", seed_1="hold", seed_2="hold") == 75
    told = capfd.readouterr().out
    assert "seed-1: stopped on request" in told
    assert "seed-2: stopped on request" in told
    assert "seed-3: started" not in told
    assert sweeps("seed=1,2,3") == 0
    assert [attempts(tmp_path, f"seed-{n}") for n in (1, 2, 3)] == [2, 2, 1]


def test_a_trial_that_does_not_stop_is_killed(
    sweeps: Sweeps, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    meanwhile(lambda: wait_for(lambda: attempts(tmp_path, "seed-1")))
    assert sweeps("seed=1,2", "launch.shutdown_timeout_seconds=1", seed_1="ignore") == 75
    told = capfd.readouterr().err
    assert "seed-1: has not stopped within 1 s (launch.shutdown_timeout_seconds): killed" in told
    assert "seed-1: killed by SIGKILL" in told


def test_a_second_sweep_at_the_same_time_is_refused(
    sweeps: Sweeps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "ORPHANS_SECONDS", 0.05)
    codes = list[int]()

    def second() -> None:
        wait_for(lambda: attempts(tmp_path, "seed-1"))
        codes.append(sweeps("seed=1,2", seed_1="hold"))

    meanwhile(second)
    assert sweeps("seed=1,2", seed_1="hold") == 75
    assert codes == [64]
    assert "another sweep, or a trial of it, is running there" in capfd.readouterr().err
