"""What mingpt.launch makes of a pod's variables where PET_… and a PyTorchJob's four are set side by side, or wrong."""

import pytest

from mingpt.errors import UserError
from mingpt.launch.torchrun import Torchrun, parse

JOB = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}
TORCHRUN = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": "29400"}
ELASTIC = {"PET_NNODES": "1:3", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "localhost:23456"}


def node(environment: dict[str, str], *arguments: str) -> Torchrun:
    return Torchrun.compose(parse(["--nproc-per-node=1", *arguments]), environment)


def problems(environment: dict[str, str], *arguments: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        Torchrun.compose(parse(arguments), environment)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    "others",
    [
        {"PET_NPROC_PER_NODE": "2"},
        {"PET_MASTER_PORT": "29400"},
        {"PET_RDZV_CONF": "timeout=7"},
        {"PET_NODE_RANK": "1"},
        {"PET_NNODES": "2", "PET_NODE_RANK": "1"},
        TORCHRUN,  # training-operator v1.9
        TORCHRUN | {"PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "8"},  # since v1.7 it counts processes
        TORCHRUN | {"PET_NPROC_PER_NODE": "auto"},
    ],
)
def test_a_pytorchjob_tells_what_torchruns_variables_do_not(others: dict[str, str]) -> None:
    found = node(JOB | others)
    assert (found.least, found.most, found.rank, found.backend) == (2, 2, 1, "static")
    assert (found.host, found.port) == ("localhost", 29400)


def test_torchruns_variables_that_say_where_to_meet_are_enough() -> None:
    """Older operators give an elastic job both, and node 0 of its workers is not the PyTorchJob's RANK 0."""
    found = node({**ELASTIC, **JOB, "RANK": "0", "WORLD_SIZE": "4"})
    assert (found.least, found.most, found.rank, found.backend) == (1, 3, None, "c10d")
    assert (found.host, found.port) == ("localhost", 23456)
    without_port = {name: value for name, value in TORCHRUN.items() if name != "PET_MASTER_PORT"}
    assert node({**without_port, "RANK": "1"}).port == 29500
    assert node({**without_port, **JOB}).port == 29400
    (problem,) = problems({"PET_RDZV_ENDPOINT": "localhost:1", **JOB})
    assert problem.startswith("torchrun's variables: PET_RDZV_ENDPOINT=localhost:1 is set in the environment, but not ")


def test_a_pod_of_one_node_is_alone() -> None:
    alone = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "x", "PET_NPROC_PER_NODE": "8"}
    assert node({**alone, **JOB, "WORLD_SIZE": "8", "RANK": "0", "MASTER_ADDR": "x"}).most == 1
    assert node({"PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "1", "RANK": "0"}).most == 1


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            TORCHRUN | JOB | {"RANK": "0", "MASTER_ADDR": "other", "MASTER_PORT": "1"},
            [
                "PET_NODE_RANK=1 and RANK=0 in the environment contradict each other: correct one, or unset it",
                "PET_MASTER_ADDR=localhost and MASTER_ADDR=other in the environment contradict each other: correct "
                "one, or unset it",
                "PET_MASTER_PORT=29400 and MASTER_PORT=1 in the environment contradict each other: correct one, or "
                "unset it",
            ],
        ),
        (
            JOB | {"PET_NNODES": "1"},
            ["PET_NNODES=1 and WORLD_SIZE=2 in the environment contradict each other: correct one, or unset it"],
        ),
        (
            TORCHRUN | JOB | {"PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "4"},
            ["PET_NNODES=2 and WORLD_SIZE=4 in the environment contradict each other: correct one, or unset it"],
        ),
    ],
)
def test_variables_that_contradict_each_other_are_refused(environment: dict[str, str], expected: list[str]) -> None:
    assert problems(environment) == expected


@pytest.mark.parametrize(
    ("environment", "there", "missing"),
    [
        ({"PET_NPROC_PER_NODE": "2", "RANK": "1"}, "RANK=1 is", "WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (
            {"PET_MASTER_PORT": "29400", "RANK": "1", "WORLD_SIZE": "2"},
            "WORLD_SIZE=2, RANK=1 are",
            "MASTER_ADDR",
        ),
        (
            {"PET_NNODES": "2", "WORLD_SIZE": "2", "MASTER_PORT": "1"},
            "MASTER_PORT=1, WORLD_SIZE=2 are",
            "RANK, MASTER_ADDR",
        ),
        (JOB | {"MASTER_ADDR": " "}, "WORLD_SIZE=2, RANK=1, MASTER_PORT=29400 are", "MASTER_ADDR"),
    ],
)
def test_a_pytorchjob_that_lacks_a_variable_is_refused(environment: dict[str, str], there: str, missing: str) -> None:
    (problem,) = problems(environment)
    assert problem.startswith(f"a PyTorchJob's variables: {there} set in the environment, but not {missing}: set all")
