"""What processes make of Slurm's variables, as a real Slurm 22.05 sets them (the launcher: launch/commands.yaml)."""

import os
import sys
from pathlib import Path

import pytest

from mingpt.cli import cli
from mingpt.errors import UserError
from mingpt.world import slurm
from tests.kits.node_kit import Node, wait_until
from tests.kits.told import Told

# The batch script of `sbatch --nodes=2 --ntasks-per-node=2 --gpus-per-task=1`, on the first of its nodes.
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_GPUS_ON_NODE": "2",
    "SLURMD_NODENAME": "n1",
}
# The last of its tasks.
TASK = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "n2",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[8-9],x", ["r1n8", "r1n9", "r2n8", "r2n9", "x"]),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert slurm.hostnames(text) == names


# Cut off, and told at once: not after trying all ways to cut it.
LONG = ",".join(f"ip-10-0-0-{n}" for n in range(100)) + ",ip-10-0-1-[0"


@pytest.mark.parametrize(
    "text",
    ["a,n[1-3", "n1-3]", "n[]", "n[a-b]", "n[1[2]]", "a,,b", "n[3-1],m", LONG],
)
def test_what_is_no_host_list_is_a_mistake(text: str) -> None:
    with pytest.raises(UserError, match="SLURM_JOB_NODELIST"):
        slurm.hostnames(text)


def announced(environment: dict[str, str]) -> dict[str, str]:
    """What slurm.set_torchrun_variables adds."""
    after = dict(environment)
    slurm.set_torchrun_variables(after)
    assert after.items() >= environment.items()
    return {k: v for k, v in after.items() if k not in environment}


def test_a_component_of_a_heterogeneous_job_does_not_train_alone() -> None:
    announced(TASK | {"SLURM_HET_SIZE": "1"})
    with pytest.raises(UserError, match=r"^SLURM_HET_SIZE=2: "):
        announced(TASK | {"SLURM_HET_SIZE": "2"})


def test_a_task_is_told_what_torchrun_would_tell_it() -> None:
    assert announced(TASK) == {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "10112",
    }  # fmt: skip
    # Another step of the job has another port; so has the next job on the same nodes.
    assert announced(TASK | {"SLURM_STEP_ID": "1"})["MASTER_PORT"] == "10113"
    assert announced(TASK | {"SLURM_JOB_ID": "8"})["MASTER_PORT"] == "10128"
    chosen = announced(TASK | {"MASTER_ADDR": "n1-ib", "MASTER_PORT": "5"})
    assert "MASTER_ADDR" not in chosen
    assert "MASTER_PORT" not in chosen


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH,
        TASK | {"SLURM_NTASKS": "1"},
        TASK | {"RANK": "0"},  # under torchrun
        TASK | {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # salloc's shell
    ],
)
def test_others_are_told_nothing(environment: dict[str, str]) -> None:
    assert announced(environment) == {}


@pytest.mark.parametrize("lost", ["NODELIST", "NTASKS", "NTASKS NNODES"])
def test_a_task_that_is_not_told_where_to_meet_or_how_many_there_are_ends_with_64(
    lost: str, told: Told, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {k: v for k, v in TASK.items() if k.rpartition("_")[2] not in lost.split()}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(sys, "argv", ["mingpt"])  # else those that a test before has left
    with pytest.raises(SystemExit) as ended:
        cli.main("train")
    assert ended.value.code == 64
    told(capsys.readouterr().err)
    if lost == "NODELIST":
        assert announced(environment | {"MASTER_ADDR": "n1"})["RANK"] == "3"


def test_a_task_that_sees_its_own_gpus_only_takes_the_first() -> None:
    assert slurm.hides_gpus(TASK, 1)  # --gpus-per-task=1
    assert not slurm.hides_gpus(TASK, 2)  # --gpus-per-node=2: each task sees both
    assert not slurm.hides_gpus(TASK, 0)
    assert not slurm.hides_gpus(TASK | {"SLURM_GPUS_ON_NODE": "1"}, 1)  # two tasks and one GPU: a mistake
    assert not slurm.hides_gpus(TASK | {"TORCHELASTIC_RUN_ID": "x"}, 1)  # torchrun's second worker needs its second
    assert not slurm.hides_gpus({}, 1)


def test_a_task_ends_with_the_slurmstepd_that_slurm_knows_it_by(tmp_path: Path) -> None:
    program = tmp_path / "slurmstepd"  # a process of that name, which starts a task and is killed
    program.symlink_to("/bin/bash")
    task = (
        "import time; from mingpt.world.lifetime import Lifetime; Lifetime().begin(); print('begun', flush=True); "
        "time.sleep(3600)"
    )
    step = Node([str(program), "-c", '"$0" -c "$1" & wait', sys.executable, task])
    wait_until(lambda: step.lines, "the task has begun")
    step.process.kill()
    step.assert_nothing_left()
