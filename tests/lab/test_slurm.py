"""The Slurm recipes, unedited, submitted by a user to a real Slurm."""

import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from mingpt.world.slurm import hostnames
from tests.lab.lab_kit import (
    ROOT,
    SMALL,
    USER,
    as_user,
    checkout,
    cut,
    digest,
    mend,
    needs_lab,
    on,
    own,
    shared,
    undisturbed,
    wait_until,
)

pytestmark = [pytest.mark.lab, needs_lab]

OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
READY = {"MINGPT_PYTHON": sys.prefix}
QUICK = (*SMALL, "world.timeout_seconds=20", "world.init_timeout_seconds=60")
# Goes on until it is stopped, and a step's state does not depend on when that is.
ENDLESS = (*QUICK, "train.max_steps=1000000", "train.eval_every=0", "schedule=constant", "snapshot.keep=1000")


@pytest.fixture(scope="module")
def project() -> Path:
    """A checkout in the user's home, as a user has it."""
    folder = shared("slurm")
    checkout(folder)
    return folder


@pytest.fixture(scope="module")
def alone(project: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the recipes' experiment in one process; brings the project's data along."""
    result = undisturbed(tmp_path_factory.mktemp("alone"), "shakespeare_10m", SMALL)
    shutil.copytree(ROOT / "data", project / "data", dirs_exist_ok=True)
    own(project)
    return result


@dataclass
class Job:
    number: str
    project: Path
    name: str  # of its logs

    def field(self, name: str) -> str:
        found = re.search(rf"\b{name}=(\S*)", on("login", "scontrol", "show", "job", "-o", self.number))
        assert found, name
        return found[1]

    def log(self, ending: str = "out") -> str:
        file = self.project / f"{self.name}_{self.number}.{ending}"
        return file.read_text(errors="replace") if file.exists() else ""

    def wait(self, limit: float = 300) -> tuple[str, str]:
        """Its last state and its batch script's exit code."""
        wait_until(lambda: self.field("JobState") in OVER, f"the end of job {self.number}\n{self.tail()}", limit)
        return self.field("JobState"), self.field("ExitCode").partition(":")[0]

    def wait_for(self, pattern: str, times: int = 1, limit: float = 180) -> None:
        def seen() -> bool:
            assert self.field("JobState") not in OVER, self.tail()
            return len(re.findall(pattern, self.log(), re.M)) >= times

        wait_until(seen, f"{pattern} in the log of job {self.number}", limit)

    def tail(self) -> str:
        return f"{self.log()[-3000:]}\n--- err\n{self.log('err')[-3000:]}"


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs that are cancelled at the test's end."""
    started: list[Job] = []
    yield started
    for job in started:
        on("login", "scancel", job.number, check=False)
    on("login", "scancel", f"--user={USER}", check=False)


def submit(
    jobs: list[Job], project: Path, recipe: str, options: str, *arguments: str, env: dict[str, str] = READY
) -> Job:
    words = ["env", *(f"{k}={v}" for k, v in env.items()), "sbatch", "--parsable", *options.split()]
    number = as_user(project, *words, f"recipes/slurm/{recipe}.sbatch", *arguments).strip().splitlines()[-1]
    jobs.append(Job(number, project, recipe))
    return jobs[-1]


def finished(job: Job, limit: float = 300) -> None:
    assert job.wait(limit) == ("COMPLETED", "0"), job.tail()


@pytest.mark.slow
def test_set_up_by_itself_and_a_process_for_each_gpu(alone: str, project: Path, jobs: list[Job]) -> None:
    run = shared("train")
    job = submit(jobs, project, "train", "--nodes=2 --gpus-per-node=2", f"run.dir={run}", *SMALL, env={})
    finished(job, 600)
    assert "4 processes on cpu (gloo), 16 microbatches of 4 x 32 tokens" in job.log()
    assert digest(run) == alone


@pytest.mark.parametrize(
    ("recipe", "options", "processes"),
    [
        ("train", "--nodes=2 --gpus=3", 3),  # nodes with different numbers of GPUs
        ("train", "--nodes=2 --ntasks-per-node=2 --gpus-per-task=1", 4),  # still one launcher a node
        ("gloo", "--nodes=2 --ntasks-per-node=2", 4),
        ("nccl", "--nodes=6 --gpus-per-node=1", 6),
        ("elastic", "--nodes=2 --gpus=3 --mem=2G", 3),
    ],
)
def test_the_digest_is_that_of_one_process(
    recipe: str, options: str, processes: int, alone: str, project: Path, jobs: list[Job]
) -> None:
    run = shared(recipe)
    # There is no GPU here that nccl could use.
    more = ("world.backend=gloo", "experiment=shakespeare_10m") if recipe in ("nccl", "gloo") else ()
    job = submit(jobs, project, recipe, options, f"run.dir={run}", *QUICK, *more)
    finished(job)
    assert f"{processes} processes on cpu (gloo)" in job.log()
    assert digest(run) == alone


def test_mistakes_end_the_job_with_64_and_their_message(alone: str, project: Path, jobs: list[Job]) -> None:
    cases = [
        ("train", "--nodes=2", ["modle.n_head=2"], {}, "modle.n_head is not a key (did you mean model.n_head?)"),
        ("nccl", "--nodes=1", [], {}, "world.backend=nccl, but no GPU is visible"),
        ("train", "--nodes=1", [], {"MINGPT_PYTHON": "/nowhere"}, "MINGPT_PYTHON=/nowhere: there is no such program"),
    ]
    for recipe, options, arguments, env, message in cases:
        job = submit(jobs, project, recipe, options, *arguments, env=READY | env)
        assert job.wait() == ("FAILED", "64"), job.tail()
        assert message in job.log("err")


@pytest.mark.slow
def test_a_task_that_is_killed_ends_the_job_with_70(project: Path, alone: str, jobs: list[Job]) -> None:
    options = "--nodes=2 --ntasks-per-node=2"
    job = submit(jobs, project, "gloo", options, f"run.dir={shared('killed')}", *ENDLESS, "experiment=shakespeare_10m")
    job.wait_for("^step ")
    on(job.field("BatchHost"), "pkill", "-9", "-n", "-f", "mingpt[.]train")
    began = time.monotonic()
    assert job.wait() == ("FAILED", "70"), job.tail()
    assert time.monotonic() - began < 60
    nodes = hostnames(job.field("NodeList"))
    left = lambda: [n for n in nodes if on(n, "pgrep", "-f", "mingpt[.]train", check=False).strip()]  # noqa: E731
    wait_until(lambda: not left(), "no process is left", 30)


def has_the_bits_of_one_process(
    job: Job, run: Path, processes: int, folder: Path, experiment: str, overrides: tuple[str, ...]
) -> None:
    """Cancels it after a snapshot of its newest attempt with so many processes."""
    first = int(re.findall(rf"^attempt \d+: steps (\d+) to .* {processes} processes", job.log(), re.M)[-1])
    step = (first // 10 + 2) * 10
    job.wait_for(f"^step {step}: snapshot")
    as_user(job.project, "scancel", job.number)
    assert job.wait()[0] == "CANCELLED"
    undisturbed(folder, experiment, (*overrides, f"train.max_steps={step + 1}"))
    ours, theirs = (read(Store(f"{place}/snapshots"), step).manifest.digest for place in (run, folder / "alone"))
    assert ours == theirs


@pytest.mark.slow
def test_elastic_goes_on_with_two_nodes_and_takes_the_third_back(
    alone: str, project: Path, jobs: list[Job], tmp_path: Path
) -> None:
    run = shared("elastic")
    overrides = (*ENDLESS, "snapshot.every_steps=10")
    job = submit(
        jobs, project, "elastic", "--nodelist=n[1-3] --gpus-per-node=1", f"run.dir={run}", *overrides,
        "--rdzv-conf=last_call_timeout=5",
    )  # fmt: skip
    job.wait_for(r"^attempt \d+: .* 3 processes")  # on a slow machine the third joins two that have begun
    job.wait_for(r"^step +30/")
    two = r"^attempt \d+: .* 2 processes"
    before = len(re.findall(two, job.log(), re.M))
    cut(3)
    try:
        job.wait_for(two, times=before + 1)
        job.wait_for("^slurm: n3 is no longer in the job")
    finally:
        mend(3)
    job.wait_for(r"^attempt \d+: .* 3 processes", times=2)
    has_the_bits_of_one_process(job, run, 3, tmp_path, "shakespeare_10m", overrides)
    # The stand-in for n3 goes with it.
    wait_until(lambda: not on("login", "squeue", "-h", f"--user={USER}").strip(), "the queue is empty", 60)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["elastic", "train", "gloo"])
def test_a_lost_head_is_a_requeue(recipe: str, alone: str, project: Path, jobs: list[Job], tmp_path: Path) -> None:
    run, overrides = shared(f"head-{recipe}"), (*ENDLESS, "snapshot.every_steps=10")
    options = "--nodes=2 --gpus-per-node=1 --exclude=n1,n2,n3"
    job = submit(jobs, project, recipe, options, f"run.dir={run}", *overrides)
    job.wait_for(r"^step +30/")
    head = int(job.field("BatchHost")[1:])
    steps = on("login", "squeue", "--steps", "--noheader", f"--jobs={job.number}", "--format=%i").split()
    first_start = [step for step in steps if step.rpartition(".")[2].isdigit()]
    cut(head)
    try:
        wait_until(lambda: job.field("JobState") == "PENDING", f"job {job.number} is in the queue again", 300)
        on("login", "scontrol", "update", f"JobId={job.number}", "StartTime=now")
        job.wait_for(r"^resumed from step \d+")
        job.wait_for(r"^attempt \d+: .* 2 processes", times=2)
        assert job.field("Restarts") == "1"
        assert job.field("BatchHost") != f"n{head}"
    finally:
        mend(head)
    # As the lost node does when it is back: its srun has seen its tasks end, and ends their step by its number.
    assert first_start
    on("login", "scancel", *first_start, check=False)
    experiment = "shakespeare_char" if recipe == "gloo" else "shakespeare_10m"
    has_the_bits_of_one_process(job, run, 2, tmp_path, experiment, overrides)
