"""What goes back into a real Slurm's queue, and where it starts again: an array's task."""

import re
import sys
from pathlib import Path

import pytest

from tests.lab.lab_kit import needs_lab, on, shared, wait_until
from tests.lab.test_slurm import Job, jobs, project, submit

pytestmark = [pytest.mark.lab, needs_lab]
__all__ = ["jobs", "project"]  # fixtures

# Needs no data, and goes on until it is stopped.
SYNTHETIC = ("train.max_steps=1000000", "train.eval_every=0", "schedule=constant", "snapshot.every_steps=20")


class ArrayTask(Job):
    """Numbered as ARRAY_TASK. The last task's own job id is that of the array, by which Slurm takes all tasks."""

    def log(self, ending: str = "out") -> str:
        return Job(self.field("JobId"), self.project, self.name).log(ending)


def start_now(job: Job) -> None:
    """Slurm holds what was requeued for two minutes."""
    wait_until(lambda: job.field("JobState") == "PENDING", f"job {job.number} is back in the queue\n{job.tail()}")
    on("login", "scontrol", "update", f"JobId={job.number}", "StartTime=now")


def test_one_task_of_an_array_goes_back_into_the_queue_alone(project: Path, jobs: list[Job]) -> None:
    run = "run.dir=" + str(shared("array")) + "/${oc.env:SLURM_ARRAY_TASK_ID}"
    # Nothing else is exported, also not to the steps, unless the script sees to it.
    options = f"--array=1-2 --nodes=1 --export=MINGPT_PYTHON={sys.prefix}"
    array = submit(jobs, project, "synthetic", options, run, *SYNTHETIC, env={})
    tasks = [ArrayTask(f"{array.number}_{n}", project, "synthetic") for n in (1, 2)]
    for task in tasks:
        task.wait_for("^step 20: snapshot ")
    # As Slurm does before the time limit.
    on("login", "scancel", "--batch", "--signal=USR1", tasks[0].number)
    wait_until(lambda: "back in the queue, to go on" in tasks[0].log(), "the task is requeued")
    start_now(tasks[0])
    wait_until(lambda: re.search(r"^resumed from step \d+ of ", tasks[0].log(), re.M), "the task resumes")
    assert [task.field("Restarts") for task in tasks] == ["1", "0"]
    assert tasks[1].field("JobState") == "RUNNING"
