"""What the launcher and the processes make of Slurm's variables, as a real Slurm 22.05 sets them, and of nonsense."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mingpt.config import compose
from mingpt.errors import UserError
from mingpt.launch.torchrun import Torchrun, parse
from mingpt.world import slurm
from mingpt.world.platforms import find_placement
from node_kit import Node, free_port, wait_until
from run_kit import TIME_LIMIT, Run

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
ONCE_A_NODE = TASK | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1"}


@pytest.mark.parametrize(("name", "rank"), [("n1", 0), ("n2", 1)])
def test_a_step_of_one_node_may_be_one_of_several(name: str, rank: int) -> None:
    """As elastic.sbatch starts them: each step knows of itself alone, the options name the head."""
    step = {"SLURM_STEP_NODELIST": name, "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_NTASKS": "1"}
    options = ["--nnodes=1:2", f"--node-rank={rank}", "--rdzv-endpoint=n1:29500", "--rdzv-id=x", "--nproc-per-node=1"]
    node = Torchrun.compose(parse(options), ONCE_A_NODE | step | {"SLURM_PROCID": "0", "SLURMD_NODENAME": name})
    assert (node.backend, node.host, node.own) == ("c10d", "n1", name)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[8-9],x", ["r1n8", "r1n9", "r2n8", "r2n9", "x"]),
        ("p4d-dy-24xlarge-[1-2]", ["p4d-dy-24xlarge-1", "p4d-dy-24xlarge-2"]),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert slurm.hostnames(text) == names


@pytest.mark.parametrize(
    "text", ["n[1-3", "n[1-2,4", "a,n[1-3", "n1-3]", "n[]", "n[1-]", "n[a-b]", "n[1[2]]", "a,,b", "a,", "n[3-1],m"]
)
def test_what_is_no_host_list_is_a_mistake(text: str) -> None:
    with pytest.raises(UserError) as caught:
        slurm.hostnames(text)
    assert list(caught.value.problems) == [
        f"{text}: Slurm's list of nodes (SLURM_STEP_NODELIST, SLURM_JOB_NODELIST) can't be read: expected names such "
        f"as gpu[01-03,7],login: leave these variables as Slurm sets them"
    ]


def test_a_list_that_is_cut_off_is_told_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match="can't be read"):
        slurm.hostnames(",".join(f"ip-10-0-0-{n}" for n in range(100)) + ",ip-10-0-1-[0")
    assert time.monotonic() - began < 5


def torchrun(environment: dict[str, str], *arguments: str) -> list[str]:
    node = Torchrun.compose(parse(arguments), environment)
    config = compose.configure(node.overrides, node.fewest_processes)
    assert config is not None
    return node.command(config).arguments


def test_the_launcher_needs_no_options_in_a_step_of_one_task_a_node() -> None:
    for rank, own in enumerate(["n1", "n2"]):
        words = torchrun(ONCE_A_NODE | {"SLURM_NODEID": str(rank)})
        assert words[:7] == [
            "--nnodes=2",
            "--nproc-per-node=2",
            "--rdzv-backend=mingpt-static",
            "--rdzv-endpoint=n1:10112",  # 10000 + 16 x 7
            "--rdzv-id=slurm-7",
            f"--rdzv-conf=rank={rank},timeout=300",
            f"--local-addr={own}",
        ]


def test_a_step_on_some_of_the_nodes_is_a_world_of_those() -> None:
    place = find_placement(ONCE_A_NODE | {"SLURM_STEP_NODELIST": "n2", "SLURM_NODEID": "0", "SLURM_NNODES": "1",
                                          "SLURM_NTASKS": "1"})  # fmt: skip
    assert place is not None
    assert (place.addresses, place.rank) == (("n2",), 0)


def test_nodes_may_differ_in_gpus_and_one_without_has_one_process() -> None:
    assert "--nproc-per-node=1" in torchrun(ONCE_A_NODE | {"SLURM_GPUS_ON_NODE": "1"})
    without = {k: v for k, v in ONCE_A_NODE.items() if k != "SLURM_GPUS_ON_NODE"}
    assert "--nproc-per-node=1" in torchrun(without)
    assert "--nproc-per-node=3" in torchrun(without, "--nproc-per-node=3")


def test_skypilot_on_slurm_has_the_word() -> None:
    place = find_placement(ONCE_A_NODE | SKYPILOT)
    assert place is not None
    assert (place.platform, place.head) == ("SkyPilot", "10.0.0.1")
    environment = TASK | SKYPILOT
    slurm.set_torchrun_variables(environment)
    assert environment == TASK | SKYPILOT


def test_the_batch_script_of_one_node_is_that_node() -> None:
    one = {"SLURM_JOB_NODELIST": "n1", "SLURM_NNODES": "1", "SLURM_NTASKS": "4"}
    place = find_placement(BATCH | one)
    assert place is not None
    assert (place.addresses, place.gpus) == (("n1",), 2)


SRUN = "start it on each with `srun --ntasks-per-node=1 mingpt launch …`, or unset SLURM_JOB_NODELIST to be on your own"
NODES = "Slurm's job 7, on one machine, and the job's nodes are"


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (BATCH, f"this is the shell of {NODES} n1, n2: {SRUN}"),
        # salloc's shell, on the login node
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NNODES": "1"},
            f"this is the shell of {NODES} n1: {SRUN}",
        ),
        # salloc's shell, in the step that is made for it
        (TASK | {"SLURM_STEP_ID": str(0xFFFFFFFA)}, f"this is the shell of {NODES} n1, n2: {SRUN}"),
        (
            TASK,
            "Slurm's job 7: SLURM_NTASKS=4, SLURM_NNODES=2, and `mingpt launch` is for one task a node: give srun "
            "--ntasks=2 --ntasks-per-node=1; or start `mingpt train` in place of it, once for each GPU",
        ),
        (  # the second node has nobody, and would be waited for
            ONCE_A_NODE | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"},
            "Slurm's job 7: SLURM_NTASKS=1, SLURM_NNODES=2, and `mingpt launch` is for one task a node: give srun "
            "--ntasks=2 --ntasks-per-node=1",
        ),
        (
            ONCE_A_NODE | {"SLURM_NODEID": "2"},
            "Slurm's job 7: its variables contradict each other: SLURM_NNODES=2, SLURM_NODEID=2, and the nodes n1, n2: "
            "start with srun, or unset SLURM_JOB_NODELIST and SLURM_STEP_ID to be on your own",
        ),
        (
            ONCE_A_NODE | {"SLURM_NTASKS": "two"},
            "Slurm's job 7: SLURM_NTASKS, SLURM_NODEID, SLURM_NNODES, SLURM_GPUS_ON_NODE: invalid literal for int() "
            "with base 10: 'two': start with srun, or unset SLURM_JOB_NODELIST and SLURM_STEP_ID to be on your own",
        ),
    ],
)
def test_what_contradicts_itself_is_a_mistake(environment: dict[str, str], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        find_placement(environment)
    assert list(caught.value.problems) == [problem]


def announced(environment: dict[str, str]) -> dict[str, str]:
    """What slurm.set_torchrun_variables adds."""
    after = dict(environment)
    slurm.set_torchrun_variables(after)
    assert after.items() >= environment.items()
    return {k: v for k, v in after.items() if k not in environment}


@pytest.mark.parametrize("start", [announced, find_placement])
def test_a_component_of_a_heterogeneous_job_does_not_train_alone(start: Callable[[dict[str, str]], object]) -> None:
    environment = TASK if start is announced else ONCE_A_NODE
    start({**environment, "SLURM_HET_SIZE": "1"})
    with pytest.raises(UserError, match=r"^SLURM_HET_SIZE=2: each component of a heterogeneous job would train alone"):
        start({**environment, "SLURM_HET_SIZE": "2"})


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
    [{}, BATCH, TASK | {"SLURM_NTASKS": "1"}, TASK | {"RANK": "0"}, TASK | {"SLURM_STEP_ID": str(0xFFFFFFFA)}],
    ids=["no Slurm", "a batch script", "the only task", "under torchrun", "salloc's shell"],
)
def test_others_are_told_nothing(environment: dict[str, str]) -> None:
    assert announced(environment) == {}


def without(*names: str) -> dict[str, str]:
    return {k: v for k, v in ONCE_A_NODE.items() if k not in names}


LISTS = ("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST")


@pytest.mark.parametrize(
    ("environment", "there", "names"),
    [
        (
            without(*LISTS),
            "SLURM_STEP_ID=0, SLURM_NNODES=2, SLURM_NTASKS=2",
            "SLURM_STEP_ID, SLURM_NNODES, SLURM_NTASKS",
        ),
        (
            without("SLURM_JOB_NODELIST", "SLURM_NTASKS"),
            "SLURM_STEP_ID=0, SLURM_NNODES=2",
            "SLURM_STEP_ID, SLURM_NNODES",
        ),
        (without(*LISTS, "SLURM_NNODES"), "SLURM_STEP_ID=0, SLURM_NTASKS=2", "SLURM_STEP_ID, SLURM_NTASKS"),
    ],
)
def test_a_task_of_several_that_is_not_told_the_nodes_is_not_alone(
    environment: dict[str, str], there: str, names: str
) -> None:
    with pytest.raises(UserError) as caught:
        find_placement(environment)
    assert list(caught.value.problems) == [
        f"Slurm's job 7: {there} are set in the environment, but not SLURM_JOB_NODELIST: set all of them, or unset "
        f"{names} to be on your own"
    ]
    # The cure is one.
    assert find_placement({k: v for k, v in environment.items() if k not in names.split(", ")}) is None


def test_a_job_of_one_node_and_what_no_srun_has_started_may_lack_the_list() -> None:
    assert find_placement(without(*LISTS) | {"SLURM_NNODES": "1", "SLURM_NTASKS": "1"}) is None
    assert find_placement({k: v for k, v in BATCH.items() if k not in LISTS}) is None


@pytest.mark.parametrize("program", ["mingpt.train", "mingpt.evaluate"])
def test_tasks_that_are_not_told_where_to_meet_end_with_64(program: str) -> None:
    environment = {k: v for k, v in TASK.items() if k not in LISTS}
    command = [sys.executable, "-m", program]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (64, "")
    assert done.stderr == (
        "error: srun has started 4 tasks (SLURM_NTASKS), but neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is "
        "set: leave these variables as Slurm sets them, or set MASTER_ADDR to the node of task 0\n"
    )
    assert announced(environment | {"MASTER_ADDR": "n1"})["RANK"] == "3"


@pytest.mark.parametrize("lost", [{}, {"SLURM_NNODES"}])
def test_a_task_that_is_not_told_how_many_there_are_is_not_alone(lost: set[str]) -> None:
    environment = {k: v for k, v in TASK.items() if k not in {"SLURM_NTASKS", *lost}}
    with pytest.raises(UserError) as caught:
        announced(environment)
    assert list(caught.value.problems) == [
        f"srun has started this task, number 3 of a step of {'?' if lost else 2} nodes, but SLURM_NTASKS is not set: "
        f"leave Slurm's variables as Slurm sets them"
    ]


def test_a_task_that_sees_its_own_gpus_only_takes_the_first() -> None:
    assert slurm.hides_gpus(TASK, 1)  # --gpus-per-task=1
    assert not slurm.hides_gpus(TASK, 2)  # --gpus-per-node=2: each task sees both
    assert not slurm.hides_gpus(TASK, 0)
    assert not slurm.hides_gpus(TASK | {"SLURM_GPUS_ON_NODE": "1"}, 1)  # two tasks and one GPU: a mistake
    assert not slurm.hides_gpus(TASK | {"TORCHELASTIC_RUN_ID": "x"}, 1)  # torchrun's second worker needs its second
    assert not slurm.hides_gpus({}, 1)


@pytest.mark.slow
def test_tasks_are_a_world(new_run: Callable[..., Run], undisturbed: Callable[..., Run]) -> None:
    """As srun starts them, here with a node list that names this machine."""
    run, port = new_run(), str(free_port())
    tasks = []
    for rank in range(2):
        env = TASK | {"SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank)}
        env |= {"SLURM_LOCALID": str(rank), "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        tasks.append(subprocess.Popen(run.command(1), env={**os.environ, **env}))
    assert [task.wait(TIME_LIMIT) for task in tasks] == [0, 0]
    assert run.digest() == undisturbed().digest()


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
