"""`mingpt sweep` on a real Slurm and by a real SkyPilot: trials are lost, resume, and have the bits of single runs."""

import re
import sys
from pathlib import Path

import fsspec
import pytest

import lab_kit
from lab_kit import cut, digest, mend, needs_lab, on, s3, shared, sky, undisturbed, wait_until
from mingpt.snapshot.store import Store
from test_slurm import Job, as_user, jobs, project
from test_slurm_array import start_now

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(1500), needs_lab]
__all__ = ["jobs", "project"]  # fixtures

SEEDS = (1, 2, 3)
SETTINGS = ("train.max_steps=200", "train.eval_every=100", "snapshot.every_steps=10", "snapshot.hot_every_steps=0")
GRID = ("experiment=synthetic", *SETTINGS, "seed=" + ",".join(map(str, SEEDS)))


def states(told: str) -> dict[str, str]:
    """The table's states, by seed."""
    return dict(re.findall(r"^(\d) +(finished|not started|stopped|running, or killed) ", told, re.M))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folder = tmp_path_factory.mktemp("alone")
    return {n: undisturbed(folder / str(n), "synthetic", (*SETTINGS, f"seed={n}")) for n in SEEDS}


def test_an_array_of_slurm_with_a_trial_killed_and_one_requeued(
    project: Path, jobs: list[Job], alone: dict[int, str]
) -> None:
    folder = shared("sweeps")
    settings = ["env", f"MINGPT_PYTHON={sys.prefix}", f"{sys.prefix}/bin/python", "-m", "mingpt.sweep"]
    command = [*settings, *GRID, "--on=slurm", f"--dir={folder}", "--name=seeds", "--parallel=2"]

    def sweep(check: bool = True) -> str:
        return as_user(project, *command, check=check)

    def submitted() -> Job:
        (number,) = (folder / "seeds/slurm-job").read_text().split()
        jobs.append(Job(number, project, "sweep"))
        return jobs[-1]

    assert states(sweep()) == dict.fromkeys("123", "not started")
    array = submitted()
    first, second, third = (Job(f"{array.number}_{n}", project, "sweep") for n in SEEDS)
    first.wait_for("^step 10: snapshot ")
    second.wait_for("^step 10: snapshot ")
    assert third.field("Reason") == "JobArrayTaskLimit"
    assert f"job {array.number} of this sweep is in Slurm's queue" in sweep(check=False)
    # The second with its launcher and its srun; so its task ends with a crash.
    on(second.field("BatchHost"), "pkill", "-KILL", "-f", "python.* -m mingpt[.].* seed=2 ")
    assert second.wait() == ("FAILED", "70"), second.tail()
    third.wait_for("^step 10: snapshot ")
    on("login", "scancel", "--batch", "--signal=USR1", third.number)
    wait_until(lambda: "back in the queue, to go on" in third.log(), "the task is requeued")
    start_now(third)
    for task in (first, third):
        assert task.wait() == ("COMPLETED", "0"), task.tail()
    # The same command again submits the one that was killed.
    told = sweep()
    assert "2 of 3 trials have finished already" in told
    assert states(told) == {"1": "finished", "2": "running, or killed", "3": "finished"}
    again = Job(f"{submitted().number}_1", project, "sweep")
    assert again.wait() == ("COMPLETED", "0"), again.tail()
    assert states(sweep()) == dict.fromkeys("123", "finished")
    assert re.search(r"^resumed from step \d+ of ", again.log(), re.M)
    assert {n: digest(folder / f"seeds/seed-{n}") for n in SEEDS} == alone


def test_managed_jobs_of_skypilot_and_one_loses_its_node(
    alone: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, lost = "s3://sweeps/runs", 0
    for name, value in {"ACCESS_KEY_ID": "lab", "SECRET_ACCESS_KEY": "hidden", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)

    def sweep(inside: str) -> str:
        machines = f"--infra slurm --gpus L4:4 --num-nodes 1 --no-use-spot --env AWS_ENDPOINT_URL={inside}"
        more = "--env NPROC_PER_NODE=1 --secret AWS_ACCESS_KEY_ID --secret AWS_SECRET_ACCESS_KEY"
        words = ["--on=sky", f"--dir={folder}", "--name=seeds", f"--launcher-args={machines} {more}"]
        client = str(lab_kit.SCRIPTS / "client.sh")
        return lab_kit.run(client, sys.executable, "-m", "mingpt.sweep", *GRID, *words).stdout

    def steps(seed: int) -> list[int]:
        return Store(f"{folder}/seeds/seed-{seed}/snapshots").steps()

    with s3() as (here, inside):
        monkeypatch.setenv("AWS_ENDPOINT_URL", here)
        fsspec.filesystem("s3").mkdir("sweeps")
        try:
            told = sweep(inside)
            assert re.findall(r"^seeds-seed-(\d): submitted$", told, re.M) == ["1", "2", "3"]
            assert states(told) == dict.fromkeys("123", "not started")
            wait_until(lambda: steps(2), "a snapshot of the second", 600)
            (lost,) = (n for n in range(1, 7) if on(f"n{n}", "pgrep", "-f", "mingpt.*seed=2", check=False))
            cut(lost)
            going_on = sweep(inside)
            assert "seeds-seed-2: is going on" in going_on
            assert "submitted" not in going_on
            done = lambda: len(re.findall(r"seeds-seed-\d .* SUCCEEDED", sky("jobs", "queue", "-a").stdout))  # noqa: E731
            wait_until(lambda: done() == len(SEEDS), "all jobs have succeeded", 900)
            queue = sky("jobs", "queue", "-a").stdout
        finally:
            if lost:
                mend(lost)
            sky("jobs", "cancel", "-y", "-a", check=False)
        assert re.search(r"seeds-seed-2 .* 1 +SUCCEEDED", queue), queue  # recoveries
        told = sweep(inside)
        assert "3 of 3 trials have finished already" in told
        assert states(told) == dict.fromkeys("123", "finished")
        assert {n: digest(f"{folder}/seeds/seed-{n}") for n in SEEDS} == alone
