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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("garbage", "'garbage': give KEY=VALUE, several with commas between"),
        ("timeout=7,", "'': give KEY=VALUE, several with commas between"),
        ("timeout=", "'timeout=': give KEY=VALUE, several with commas between"),
        ("timeout=abc", "timeout=abc: give a number from 1 to 2147483647"),
        ("join_timeout=0", "join_timeout=0: give a number from 1 to 2147483647"),
        ("timeout=7, heartbeat_timeout=-1", "heartbeat_timeout=-1: give a number from 1 to 2147483647"),
        ("rank=x", "rank=x: give a number from 0 to 1"),
        ("is_host=maybe", "is_host=maybe: give true or false"),
    ],
)
def test_settings_of_the_rendezvous_that_torch_would_not_take_are_told(text: str, problem: str) -> None:
    assert problems(TORCHRUN | {"PET_RDZV_CONF": text, "PET_MASTER_PORT": "0"}) == [
        "environment variable PET_MASTER_PORT=0: give a number from 1 to 65535",
        f"environment variable PET_RDZV_CONF: {problem}",
    ]
    assert problems({}, "--nnodes=2", "--node-rank=0", "--master-addr=localhost", f"--rdzv-conf={text}") == [
        f"--rdzv-conf: {problem}"
    ]


def test_each_wrong_setting_is_told_and_others_are_handed_on() -> None:
    assert problems(TORCHRUN | {"PET_RDZV_CONF": "a,timeout=b,c"}) == [
        "environment variable PET_RDZV_CONF: 'a': give KEY=VALUE, several with commas between",
        "environment variable PET_RDZV_CONF: timeout=b: give a number from 1 to 2147483647",
        "environment variable PET_RDZV_CONF: 'c': give KEY=VALUE, several with commas between",
    ]
    good = "timeout=7, last_call_timeout = 5,is_host=True,theirs=a=b"
    assert node(TORCHRUN | {"PET_RDZV_CONF": good}).settings == f",{good}"


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:xyz",
        "127.0.0.1:1:2",
        "127.0.0.1:",
        ":29400",
        "http://x:1",
        "http://x",
        "[127.0.0.1]:1",
        "a b",
        "[::1",
    ],
)
def test_what_is_no_endpoint_is_told_at_once(endpoint: str) -> None:
    """Not after a minute of asking the DNS."""
    assert problems(ELASTIC | {"PET_RDZV_ENDPOINT": endpoint, "PET_NPROC_PER_NODE": "x"}) == [
        f"environment variable PET_RDZV_ENDPOINT={endpoint}: give HOST:PORT",
        "environment variable PET_NPROC_PER_NODE=x: give a number from 1",
    ]
    assert problems({}, "--nnodes=2", f"--rdzv-endpoint={endpoint}") == [f"--rdzv-endpoint={endpoint}: give HOST:PORT"]


@pytest.mark.parametrize("address", ["http://x", "x:1", "[x]", "a b"])
def test_what_is_no_address_is_told_at_once(address: str) -> None:
    assert problems(TORCHRUN | {"PET_MASTER_ADDR": address}) == [
        f"environment variable PET_MASTER_ADDR={address}: give the name or the address of a host"
    ]
    assert problems(JOB | {"MASTER_ADDR": address}) == [
        f"environment variable MASTER_ADDR={address}: give the name or the address of a host"
    ]


def test_an_empty_option_is_a_missing_one() -> None:
    needs = ["--nnodes=2 with a static rendezvous needs --master-addr, the address of node 0"]
    assert problems({}, "--nnodes=2", "--node-rank=0", "--master-addr=") == needs


@pytest.mark.parametrize(
    ("variables", "host", "port"),
    [
        (ELASTIC | {"PET_RDZV_ENDPOINT": "[::1]:29400"}, "::1", 29400),
        (ELASTIC | {"PET_RDZV_ENDPOINT": "[::1]"}, "::1", 29500),
        (ELASTIC | {"PET_RDZV_ENDPOINT": "::1:29400"}, "::1", 29400),
        (ELASTIC | {"PET_RDZV_ENDPOINT": "localhost"}, "localhost", 29500),
        (TORCHRUN | {"PET_MASTER_ADDR": "::1"}, "::1", 29400),
        (TORCHRUN | {"PET_MASTER_ADDR": "[::1]"}, "::1", 29400),
    ],
)
def test_an_address_may_be_ipv6(variables: dict[str, str], host: str, port: int) -> None:
    found = node(variables, "--local-addr=127.0.0.1")
    assert (found.host, found.port) == (host, port)


def test_a_wrong_number_of_nodes_hides_no_other_problem() -> None:
    assert problems({"WORLD_SIZE": "y", "RANK": "x", "MASTER_ADDR": "http://x", "MASTER_PORT": "z"}) == [
        "environment variable WORLD_SIZE=y: give a number of nodes, or MIN:MAX",
        "environment variable RANK=x: give a number from 0",
        "environment variable MASTER_ADDR=http://x: give the name or the address of a host",
        "environment variable MASTER_PORT=z: give a number from 1 to 65535",
    ]
    wrong = {"NNODES": "two", "NODE_RANK": "x", "NPROC_PER_NODE": "y", "MASTER_PORT": "z", "RDZV_CONF": "a"}
    assert problems({"PET_MASTER_ADDR": "localhost"} | {f"PET_{name}": value for name, value in wrong.items()}) == [
        "environment variable PET_NNODES=two: give a number of nodes, or MIN:MAX",
        "environment variable PET_NODE_RANK=x: give a number from 0",
        "environment variable PET_MASTER_PORT=z: give a number from 1 to 65535",
        "environment variable PET_RDZV_CONF: 'a': give KEY=VALUE, several with commas between",
        "environment variable PET_NPROC_PER_NODE=y: give a number from 1",
    ]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"PET_NNODES": "1:3"},
            ["environment variable PET_NNODES=1:3 needs PET_RDZV_ENDPOINT=HOST:PORT, the address of one node for all"],
        ),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0"},
            ["environment variable PET_NNODES=2 with a static rendezvous needs PET_MASTER_ADDR, the address of node 0"],
        ),
        (
            {"PET_NNODES": "2", "PET_MASTER_ADDR": "localhost"},
            ["environment variable PET_NNODES=2 with a static rendezvous needs PET_NODE_RANK, from 0 to 1"],
        ),
        (
            {"PET_NNODES": "2", "PET_RDZV_BACKEND": "static"},
            [
                "environment variable PET_NNODES=2 with a static rendezvous needs PET_MASTER_ADDR, the address of "
                "node 0",
                "environment variable PET_NNODES=2 with a static rendezvous needs PET_NODE_RANK, from 0 to 1",
            ],
        ),
    ],
)
def test_what_is_missing_is_told_by_the_variable_that_would_set_it(
    environment: dict[str, str], expected: list[str]
) -> None:
    assert problems(environment) == expected
