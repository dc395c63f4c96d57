"""What mingpt.launch makes of options and platform variables, and which ending gives which exit code."""

import argparse
import errno
import json
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from mingpt.config import compose
from mingpt.errors import SnapshotFailed, UserError
from mingpt.launch import agent
from mingpt.launch.ending import Ending
from mingpt.launch.launcher import launch
from mingpt.launch.torchrun import Torchrun, parse
from mingpt.world import platforms
from mingpt.world.failures import classify
from mingpt.world.lifetime import Lifetime, Phase, leave_reason
from mingpt.world.platforms import find_placement
from mingpt.world.secret import SECRET

SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "4",
    "SKYPILOT_TASK_ID": "sky-7",
}


def options(*arguments: str) -> argparse.Namespace:
    return parse(arguments)


def torchrun(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """The printed command, without what is the same in all of them."""
    node = Torchrun.compose(options(*arguments), environment or {})
    config = compose.configure(node.overrides, node.fewest_processes)
    assert config is not None
    words = str(node.command(config)).split()
    assert words[:3] == ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", f"OMP_NUM_THREADS={config.train.threads}", "torchrun"]
    end = words.index("--max-restarts=2")
    assert words[end : end + 5] == ["--max-restarts=2", SIGNALS, "--shutdown-timeout=300", "-m", "mingpt.train"]
    assert words[end + 5 :] == list(node.overrides)
    return " ".join(words[3:end])


def test_one_node_needs_no_options_and_listens_on_loopback() -> None:
    alone = "--rdzv-backend=mingpt-static --rdzv-endpoint=127.0.0.1:0"
    assert torchrun("--nproc-per-node", "2", "seed=2", "run.name=r") == (
        f"--nnodes=1 --nproc-per-node=2 {alone} --rdzv-id=r --rdzv-conf=rank=0,timeout=300 --local-addr=127.0.0.1"
    )
    assert torchrun("--nproc_per_node=2", "seed=2").startswith("--nnodes=1 --nproc-per-node=2 ")  # torchrun's way
    assert torchrun(environment={}).startswith(f"--nnodes=1 --nproc-per-node={max(1, torch.cuda.device_count())} ")


def test_c10d_by_hand_is_the_same_command_on_all_nodes() -> None:
    assert torchrun("--nnodes=1:4", "--nproc-per-node=2", "--rdzv-endpoint=127.0.0.1:1234", "run.name=r") == (
        "--nnodes=1:4 --nproc-per-node=2 --rdzv-backend=mingpt-c10d --rdzv-endpoint=127.0.0.1:1234 --rdzv-id=r "
        "--rdzv-conf=join_timeout=300,read_timeout=300 --local-addr=127.0.0.1"
    )


@pytest.mark.parametrize(
    "place",
    [
        ("--master-addr=127.0.0.1", "--master-port=8008", "--node-rank=0"),
        ("--rdzv-endpoint=127.0.0.1:8008", "--node-rank=0"),
    ],
    ids=["master", "endpoint"],
)
def test_nodes_with_numbers_meet_without_a_pickle(place: tuple[str, ...]) -> None:
    assert torchrun("--nnodes=2", "--nproc-per-node=1", *place, "world.init_timeout_seconds=7", "run.name=r") == (
        "--nnodes=2 --nproc-per-node=1 --rdzv-backend=mingpt-static --rdzv-endpoint=127.0.0.1:8008 --rdzv-id=r "
        "--rdzv-conf=rank=0,timeout=7 --local-addr=127.0.0.1"
    )


@pytest.mark.parametrize(("rank", "is_host", "own"), [("0", "true", "10.0.0.1"), ("1", "false", "10.0.0.2")])
def test_skypilot_tells_everything(rank: str, is_host: str, own: str) -> None:
    environment = {**SKYPILOT, "SKYPILOT_NODE_RANK": rank}
    place = "--rdzv-endpoint=10.0.0.1:29500 --rdzv-id=sky-7"
    assert torchrun("batch.micro_size=4", environment=environment) == (
        f"--nnodes=2 --nproc-per-node=4 --rdzv-backend=mingpt-static {place} "
        f"--rdzv-conf=rank={rank},timeout=300 --local-addr={own}"
    )
    assert torchrun("--rdzv-backend=c10d", "batch.micro_size=4", environment=environment) == (
        f"--nnodes=2 --nproc-per-node=4 --rdzv-backend=mingpt-c10d {place} "
        f"--rdzv-conf=join_timeout=300,read_timeout=300,is_host={is_host} --local-addr={own}"
    )
    assert "--nnodes=1:2 --nproc-per-node=4 --rdzv-backend=mingpt-c10d " in torchrun(
        "--nnodes=1:2", "batch.micro_size=4", environment=environment
    )


def test_nodes_of_an_elastic_job_come_one_by_one() -> None:
    """SkyPilot's dynamic node set tells a node how many there may be, and the addresses of those that it has found."""
    alone = {**SKYPILOT, "SKYPILOT_NODE_IPS": "10.0.0.9"}
    place = ("--nnodes=1:2", "--rdzv-endpoint=127.0.0.1:1234", "batch.micro_size=4")
    assert torchrun(*place, environment=alone) == (
        "--nnodes=1:2 --nproc-per-node=4 --rdzv-backend=mingpt-c10d --rdzv-endpoint=127.0.0.1:1234 --rdzv-id=sky-7 "
        "--rdzv-conf=join_timeout=300,read_timeout=300,is_host=false --local-addr=127.0.0.1"
    )
    fewer = "SKYPILOT_NODE_IPS has fewer addresses than SKYPILOT_NUM_NODES=2"
    for given, needed in ((["--nnodes=1:2"], "--rdzv-endpoint=HOST:PORT"), ([], "--master-addr")):
        with pytest.raises(UserError, match=f"needs {needed}.*: {fewer}"):
            Torchrun.compose(options(*given), alone)


# --- torchrun's PET_ variables, and those of a PyTorchJob's pods ---

TRAINJOB = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "localhost"}
TRAINJOB |= {"PET_MASTER_PORT": "29400"}
ELASTIC = {"PET_NNODES": "1:3", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "localhost:23456"}
PYTORCHJOB = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}


@pytest.mark.parametrize("environment", [TRAINJOB, PYTORCHJOB], ids=["TrainJob", "PyTorchJob"])
def test_kubeflows_pods_find_each_other(environment: dict[str, str]) -> None:
    command = torchrun("--nproc-per-node=1", "run.name=r", environment=environment)
    assert command == (
        "--nnodes=2 --nproc-per-node=1 --rdzv-backend=mingpt-static --rdzv-endpoint=localhost:29400 --rdzv-id=r "
        "--rdzv-conf=rank=1,timeout=300 --local-addr=localhost"
    )
    one = {**environment, "PET_NNODES": "1", "PET_NODE_RANK": "0", "WORLD_SIZE": "1", "RANK": "0"}
    one = {k: v for k, v in one.items() if k in environment}
    assert torchrun("--nproc-per-node=1", environment=one).startswith("--nnodes=1 --nproc-per-node=1 ")


def test_an_elastic_pytorchjob_is_elastic() -> None:
    command = torchrun(environment={**ELASTIC, "PET_RDZV_ID": "job", "PET_NPROC_PER_NODE": "3"})
    assert command.startswith(
        "--nnodes=1:3 --nproc-per-node=3 --rdzv-backend=mingpt-c10d --rdzv-endpoint=localhost:23456 --rdzv-id=job "
    )


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PET_NODE_RANK": "1"}, "torchrun's variables: PET_NODE_RANK=1 is set in the environment, but not PET_NNODES"),
        ({"PET_NNODES": "2"}, "environment variable PET_NNODES=2 needs PET_RDZV_ENDPOINT=HOST:PORT"),
        ({"RANK": "1"}, "a PyTorchJob's variables: RANK=1 is set in the environment, but not WORLD_SIZE, MASTER_ADDR"),
        ({"WORLD_SIZE": "2"}, "a PyTorchJob's variables: WORLD_SIZE=2 is set in the environment, but not RANK, MAS"),
    ],
)
def test_a_pod_that_lacks_a_variable_does_not_train_alone(environment: dict[str, str], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        Torchrun.compose(options(), environment)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "changed", "expected"),
    [
        (TRAINJOB, {"PET_NNODES": "two"}, "PET_NNODES=two: give a number of nodes, or MIN:MAX"),
        (TRAINJOB, {"PET_NNODES": "0"}, "PET_NNODES=0: give a number of nodes, or MIN:MAX"),
        (TRAINJOB, {"PET_NODE_RANK": "2"}, "PET_NODE_RANK=2: give a number from 0 to 1"),
        (TRAINJOB, {"PET_NPROC_PER_NODE": "cpu"}, "PET_NPROC_PER_NODE=cpu: give a number from 1"),
        (TRAINJOB, {"PET_MASTER_PORT": "http"}, "PET_MASTER_PORT=http: give a number from 1 to 65535"),
        (ELASTIC, {"PET_RDZV_BACKEND": "etcd"}, "PET_RDZV_BACKEND=etcd: unknown: choose c10d or static"),
        (TRAINJOB, {"PET_MASTER_ADDR": "no.invalid"}, "PET_MASTER_ADDR=no.invalid: Name or service not known, for 0 s"),
        (ELASTIC, {"PET_RDZV_ENDPOINT": "localhost:0"}, "PET_RDZV_ENDPOINT=localhost:0: give a number from 1 to 65535"),
        (PYTORCHJOB, {"WORLD_SIZE": "two"}, "WORLD_SIZE=two: give a number of nodes, or MIN:MAX"),
        (PYTORCHJOB, {"RANK": "-1"}, "RANK=-1: give a number from 0 to 1"),
        (PYTORCHJOB, {"RANK": "two"}, "RANK=two: give a number from 0 to 1"),
        (PYTORCHJOB, {"MASTER_PORT": "65536"}, "MASTER_PORT=65536: give a number from 1 to 65535"),
    ],
)
def test_a_wrong_variable_is_told_by_its_name(
    variables: dict[str, str], changed: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platforms, "NAMES_SECONDS", 0)
    with pytest.raises(UserError) as caught:
        Torchrun.compose(options(), {**variables, **changed})
    (problem,) = caught.value.problems
    assert problem.startswith(f"environment variable {expected}")


def test_a_port_of_a_variable_that_is_taken_is_told_by_its_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, variables in (("PET_MASTER_PORT", TRAINJOB), ("MASTER_PORT", PYTORCHJOB)):
            first = {"PET_NODE_RANK": "0", "RANK": "0", name: port}
            given = {**variables, **{key: value for key, value in first.items() if key in variables}}
            node = Torchrun.compose(options("--nproc-per-node=1", "--local-addr=127.0.0.1"), given)
            with pytest.raises(UserError, match=f"^environment variable {name}: port {port} is in use on this node"):
                node.check({})


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["--nnodes=1"], TRAINJOB, ["--nnodes=1 contradicts PET_NNODES=2 in the environment: leave the option out"]),
        (["--nnodes=1"], PYTORCHJOB, ["--nnodes=1 contradicts WORLD_SIZE=2"]),
        (
            ["--node-rank=0", "--master-addr=other"],
            TRAINJOB,
            ["--node-rank=0 contradicts PET_NODE_RANK=1", "--master-addr=other contradicts PET_MASTER_ADDR=localhost"],
        ),
        (["--rdzv-id=mine"], {"PET_NNODES": "1:2", "PET_RDZV_ID": "job"}, ["--rdzv-id=mine contradicts PET_RDZV_ID=j"]),
    ],
)
def test_a_command_line_that_contradicts_the_pods_variables_is_refused(
    arguments: list[str], environment: dict[str, str], expected: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        Torchrun.compose(options(*arguments), environment)
    assert len(caught.value.problems) == len(expected)
    for problem, start in zip(caught.value.problems, expected, strict=True):
        assert problem.startswith(start)


def test_a_command_line_may_repeat_them_and_choose_what_is_of_a_node_alone() -> None:
    command = torchrun("--nnodes=2", "--node-rank=1", "--nproc-per-node=3", environment={**TRAINJOB})
    assert command.startswith("--nnodes=2 --nproc-per-node=3 --rdzv-backend=mingpt-static --rdzv-endpoint=localhost:")


def test_torchrun_itself_takes_none_of_these_variables_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TRAINJOB, "PET_STANDALONE": "1", "PET_NO_PYTHON": "1", "PET_RDZV_ID": "theirs"}.items():
        monkeypatch.setenv(name, value)
    taken: list[argparse.Namespace] = []
    monkeypatch.setattr(agent.torchrun, "run", taken.append)
    node = Torchrun.compose(options("--nnodes=1", "--nproc-per-node=3"), {})
    config = compose.configure(node.overrides)
    assert config is not None
    agent.run(node.command(config).arguments, 1, 60, 60, 0, lambda: 0, print, Lifetime())
    assert agent.api.LocalElasticAgent is LocalElasticAgent  # whoever launches next in this process has torch's own
    (found,) = taken
    assert (found.nnodes, found.nproc_per_node, found.rdzv_backend) == ("1", "3", "mingpt-static")
    assert (found.rdzv_endpoint, found.rdzv_id) == ("127.0.0.1:0", config.run.name)
    assert [found.standalone, found.no_python, found.run_path] == [False] * 3


def test_a_node_without_gpus_has_one_process_unless_told_otherwise() -> None:
    environment = {**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}
    assert " --nproc-per-node=1 " in torchrun(environment=environment)
    assert " --nproc-per-node=3 " in torchrun("--nproc-per-node=3", environment=environment)


def test_no_platform_gives_no_placement() -> None:
    assert find_placement({}) is None


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["--nnodes=2"], {}, ["--nnodes=2 needs --rdzv-endpoint=HOST:PORT, the address of one node for all"]),
        (
            ["--nnodes=1:2", "--rdzv-backend=static"],
            {},
            [
                "--nnodes=1:2 with a static rendezvous needs --master-addr, the address of node 0",
                "--nnodes=1:2 with a static rendezvous needs --node-rank, from 0 to 1",
                "--nnodes=1:2: a static rendezvous has one size: use --rdzv-backend=c10d",
            ],
        ),
        (
            ["--nnodes=2", "--node-rank=1", "--master-addr=127..0.0.1"],
            {},
            ["--master-addr=127..0.0.1: Name or service not known: give an address that this node can reach"],
        ),
        (["--nnodes=two"], {}, ["--nnodes=two: give a number of nodes, or MIN:MAX"]),
        (["--nnodes=3:2"], {}, ["--nnodes=3:2: give a number of nodes, or MIN:MAX"]),
        (
            ["--rdzv-endpoint=10.0.0.1:1", "--rdzv-id=x"],
            {},
            [
                "--rdzv-endpoint is for several nodes: say how many with --nnodes",
                "--rdzv-id is for several nodes: say how many with --nnodes",
            ],
        ),
        (
            ["--max_restarts=3"],
            {},
            [
                "--max-restarts: not supported, since restarts go on as long as attempts leave new snapshots: leave it "
                "out, or set how many may leave none: launch.max_attempts_without_progress"
            ],
        ),
        (["--nproc-per-node=0"], {}, ["--nproc-per-node=0: give a number from 1"]),
        (
            [],
            {**SKYPILOT, "SKYPILOT_NODE_RANK": "2"},
            [
                "SkyPilot's variables contradict each other: SKYPILOT_NUM_NODES=2, SKYPILOT_NODE_RANK=2, and 2 "
                "addresses in SKYPILOT_NODE_IPS: correct them, or unset all three"
            ],
        ),
        (
            [],
            {"SKYPILOT_NODE_IPS": "10.0.0.1"},
            [
                "SkyPilot's variables: SKYPILOT_NODE_IPS=10.0.0.1 is set in the environment, but not "
                "SKYPILOT_NODE_RANK: set all of them, or unset SKYPILOT_NODE_IPS to be on your own"
            ],
        ),
        (
            [],
            {"SKYPILOT_NODE_RANK": "0"},
            [
                "SkyPilot's variables: SKYPILOT_NODE_RANK=0 is set in the environment, but not SKYPILOT_NODE_IPS: set "
                "all of them, or unset SKYPILOT_NODE_RANK to be on your own"
            ],
        ),
        (
            ["--nnodes=1"],
            {"SKYPILOT_NUM_NODES": "2"},
            [
                "SkyPilot's variables: SKYPILOT_NUM_NODES=2 is set in the environment, but not SKYPILOT_NODE_IPS, "
                "SKYPILOT_NODE_RANK: set all of them, or unset SKYPILOT_NUM_NODES to be on your own"
            ],
        ),
    ],
)
def test_each_wrong_option_is_told(arguments: list[str], environment: dict[str, str], expected: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        Torchrun.compose(options(*arguments), environment)
    assert list(caught.value.problems) == expected


def test_the_printed_command_shows_no_password() -> None:
    node = Torchrun.compose(options("run.dir=s3://user:secret@bucket/run"), {})
    config = compose.configure(node.overrides)
    assert config is not None
    command = node.command(config)
    assert "secret" not in str(command)
    assert "run.dir=s3://***@bucket/run" in str(command)  # what others see, too: `ps` shows torchrun's arguments
    assert command.overrides == ("run.dir=s3://user:secret@bucket/run",)
    assert "secret" not in " ".join(command.arguments)


def test_a_port_in_use_is_a_mistake_before_anything_starts(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**SKYPILOT, "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        port = s.getsockname()[1]
        assert launch([f"--rdzv-endpoint=10.0.0.1:{port}"], Lifetime()) == 64
    assert capfd.readouterr().err == (
        f"error: --rdzv-endpoint: port {port} is in use on this node: stop what listens there, or choose another\n"
    )


def test_a_port_that_is_not_for_users_is_a_mistake_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    node = Torchrun.compose(parse(["--nnodes=2", "--node-rank=0", "--rdzv-endpoint=127.0.0.1:80"]), {})
    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(
        UserError, match=r"^--rdzv-endpoint: port 80 can't be listened on: Permission denied: choose ano"
    ):
        node.check({})


def test_a_c10d_rendezvous_of_several_nodes_needs_a_secret() -> None:
    node = Torchrun.compose(options("--nnodes=1:2", "--rdzv-endpoint=127.0.0.1:29500"), {})
    with pytest.raises(
        UserError, match=f"^{SECRET} is not set: whoever reaches the port .* or give each node its number"
    ):
        node.check({})
    with pytest.raises(UserError, match=f"^{SECRET} is shorter than 16 characters: "):
        node.check({SECRET: "short"})
    node.check({SECRET: "x" * 16})


def test_an_option_that_this_torch_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "x" * 32)
    said: list[str] = []
    # No node 1 ever comes, so that nothing starts; what counts is that torchrun has taken the rest.
    arguments = ["--nnodes=2", "--no-such-option=3", "--rdzv-backend=mingpt-c10d", "--rdzv-endpoint=127.0.0.1:1"]
    conf = "--rdzv-conf=is_host=false,read_timeout=1"
    command = [*arguments, conf, "-m", "mingpt.train"]
    code, reason = agent.run(command, 1, 60, 60, 1, lambda: 0, said.append, Lifetime())
    assert said == [f"torch {torch.__version__} has no --no-such-option=3: left out"]
    assert code == 70
    assert reason.startswith("no contact with the node that hosts the rendezvous")
    # What ends a process that nobody answers has an end itself (it ended whole test processes 70 s later).
    assert all(t.finished.is_set() for t in threading.enumerate() if isinstance(t, threading.Timer))


# --- endings ---


def failures(tmp_path: Any, *ends: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> dict[int, ProcessFailure]:
    """What the agent sees of processes with these exit codes and last words."""
    found = {}
    for rank, (code, words) in enumerate(ends):
        file = tmp_path / f"error-{rank}.json"
        if words:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
            leave_reason(words)
        found[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(file))
    return found


def test_a_launcher_never_sees_half_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may be killed while it writes; torch's agent dies of a file that is no JSON."""
    file, plain, seen = tmp_path / "error.json", Path.replace, list[str]()

    def replace(temporary: Path, target: str) -> Path:
        assert not file.exists()
        seen.append(json.loads(temporary.read_text())["message"]["message"])
        return plain(temporary, target)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    leave_reason("the disk is full")
    leave_reason("lost contact")
    assert seen == ["the disk is full"]
    assert json.loads(file.read_text())["message"]["message"] == "the disk is full"


LOST = (70, "lost contact with another process (Connection reset by peer)")


@pytest.mark.parametrize(
    ("ends", "asked", "code", "reason"),
    [
        ([], False, 0, None),
        ([LOST, (-9, "")], False, 70, "process 1: killed (SIGKILL). If nobody did that, memory ran out: "),
        ([LOST, (70, "ValueError: x")], False, 70, "process 1: ValueError: x"),
        ([LOST, (64, "run.dir=/x: permission denied")], False, 64, "process 1: run.dir=/x: permission denied"),
        ([(75, ""), (75, "")], False, 75, "process 0: stopped on request after a snapshot"),
        ([(75, ""), (-15, "")], False, 75, "process 0: stopped on request after a snapshot"),
        ([(75, ""), (70, "OSError: y")], True, 70, "process 1: OSError: y"),
        ([(-15, "")], True, 75, "process 0: ended by SIGTERM"),
        ([(-15, "")], False, 70, "process 0: ended by SIGTERM"),  # somebody else's signal, before it listened
        ([(-6, ""), LOST], False, 70, "process 0: ended by SIGABRT"),
        ([(1, "")], False, 70, "process 0: exit code 1"),
    ],
)
def test_the_worst_and_first_cause_of_an_ending_has_the_word(
    ends: list[tuple[int, str]],
    asked: bool,
    code: int,
    reason: str | None,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ending = Ending.of(failures(tmp_path, *ends, monkeypatch=monkeypatch))
    assert ending.code(asked) == code
    if reason:
        assert ending.reasons[0].startswith(reason)


MEMORY = "[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."


@pytest.mark.parametrize(
    ("error", "phase", "code", "reason", "trace"),
    [
        (UserError("a", "b"), Phase.STARTING, 64, "2 problems:\n  1. a\n  2. b", False),
        (RuntimeError(MEMORY), Phase.JOINED, 64, "out of memory in the first step: lower batch.micro_size, ", False),
        (torch.OutOfMemoryError("CUDA"), Phase.TRAINING, 70, "out of memory: if it happens again, lower batch.", False),
        (
            RuntimeError(
                "[/x/pair.cc:537] Read error [127.0.0.1]:5: Connection reset by peer. This is typically caused by a bug"
            ),
            Phase.TRAINING,
            70,
            "lost contact with another process (Read error [127.0.0.1]:5: Connection reset by peer)",
            False,
        ),
        (RuntimeError("[/x/y.cc:7] Timed out waiting 3000ms"), Phase.TRAINING, 70, "another process has not", False),
        (SnapshotFailed("the snapshot of step 3 …"), Phase.TRAINING, 70, "the snapshot of step 3 …", False),
        (RuntimeError("DataLoader worker (pid 5) is killed"), Phase.TRAINING, 70, "a data loader process died", False),
        (
            RuntimeError("DataLoader worker (pid(s) 5, 6) exited unexpectedly"),
            Phase.TRAINING,
            70,
            "a data loader process died",
            False,
        ),
        (
            RuntimeError("DataLoader timed out after 600 seconds"),
            Phase.TRAINING,
            70,
            "no data loader process has",
            False,
        ),
        (
            ValueError("Caught ValueError in DataLoader worker process 0.\nOriginal Traceback …"),
            Phase.TRAINING,
            70,
            "ValueError: Caught ValueError in DataLoader worker process 0.",
            True,
        ),
        (
            TimeoutError("Caught TimeoutError in DataLoader worker process 0.\nOriginal Traceback …\nhttps://u:p@h"),
            Phase.TRAINING,
            70,
            "TimeoutError: Caught TimeoutError in DataLoader worker process 0.",
            True,
        ),
        (
            RuntimeError("Caught JSONDecodeError in DataLoader worker process 0.\n  fetch(url, timeout=5)\nby peer"),
            Phase.TRAINING,
            70,
            "RuntimeError: Caught JSONDecodeError in DataLoader worker process 0.",
            True,
        ),
        (KeyError("x"), Phase.TRAINING, 70, "KeyError: 'x'", True),
    ],
)
def test_an_error_says_what_to_do(error: Exception, phase: Phase, code: int, reason: str, trace: bool) -> None:
    failure = classify(error, phase)
    assert (failure.code, failure.trace) == (code, trace)
    assert failure.reason.startswith(reason)
    assert "Traceback" not in failure.reason
