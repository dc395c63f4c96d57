"""recipes/container/: two containers with names in a DNS, started as a job platform does, and what it may get wrong."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from mingpt.errors import UserError
from mingpt.world import platforms
from mingpt.world.platforms import container, find_placement
from net_kit import Net, hosts, needs_hosts
from node_kit import Node, wait_until
from paths_kit import ROOT
from run_kit import TINY, Run

ENTRY = ROOT / "recipes/container/dist.py"
SUFFIX = "pods.cluster.local"
NAMES = {f"train-{rank}.{SUFFIX}": f"10.98.0.1{rank}" for rank in (0, 1)}


def variables(rank: int, **changed: str) -> dict[str, str]:
    """What the platform sets in one of two containers."""
    told = {"RANK": rank, "WORLD_SIZE": 2, "JOB_NAME": "train", "HOSTNAME_SUFFIX": SUFFIX}
    told["MASTER_ADDR"] = f"train-0.{SUFFIX}"
    return {**{f"SING_{name}": str(value) for name, value in told.items()}, **changed}


# --- what the launcher makes of the variables, with names that mean this machine ---


def here(rank: int = 1, **changed: str) -> dict[str, str]:
    return variables(rank, SING_HOSTNAME_SUFFIX="localhost", SING_MASTER_ADDR="train-0.localhost", **changed)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A DNS: names and their addresses, of which 127.0.0.… are this machine's."""
    known = {"train-0.localhost": "127.0.0.1", "train-1.localhost": "127.0.0.2"}

    def look_up(host: bytes, *args: object, **kwargs: object) -> list[tuple[object, ...]]:
        name = host.decode()
        if name not in known:
            raise platforms.socket.gaierror(-2, "Name or service not known")
        return [(2, 1, 6, "", (known[name], 29500))]

    monkeypatch.setattr(platforms.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(platforms, "NAMES_SECONDS", 0)
    return known


def test_the_platform_tells_everything_but_the_gpus(names: dict[str, str]) -> None:
    place = find_placement(here(SING_HOST_ADDR="train-1.localhost"))
    assert place is not None
    assert (place.addresses, place.rank, place.gpus, place.job, place.port) == (
        ("train-0.localhost", "train-1.localhost"), 1, None, "train", 29500
    )  # fmt: skip
    assert container({}) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SING_RANK": "2"}, "contradict each other: SING_RANK=2, SING_WORLD_SIZE=2: correct them"),
        ({"SING_RANK": "x"}, "SING_RANK, SING_WORLD_SIZE: invalid literal for int"),
        ({"SING_HOST_ADDR": "train-0.localhost"}, "SING_HOST_ADDR=train-0.localhost, but node 1 is train-1.localhost"),
        ({"SING_JOB_NAME": "other"}, "other-1.localhost: Name or service not known, for 0 s: no name server"),
        (
            {"SING_MASTER_ADDR": "train-1.localhost"},
            "SING_MASTER_ADDR=train-1.localhost is another machine than node 0",
        ),
    ],
)
def test_what_does_not_agree_is_told(changed: dict[str, str], message: str, names: dict[str, str]) -> None:
    with pytest.raises(UserError) as mistake:
        container({**here(), **changed})
    assert message in str(mistake.value)


@pytest.mark.parametrize("name", sorted(set(here()) - {"SING_RANK"}))
def test_a_variable_that_is_missing_is_named(name: str) -> None:
    environment = here()
    del environment[name]
    with pytest.raises(UserError, match=f"SING_RANK=1, .* are set in the environment, but not {name}: set all of them"):
        container(environment)


@pytest.mark.parametrize("name", sorted(here()))
def test_a_variable_that_is_empty_is_missing(name: str) -> None:
    with pytest.raises(UserError, match=f"are set in the environment, but not {name}: set all of them"):
        container(here() | {name: ""})
    assert find_placement(dict.fromkeys(here(), "")) is None


def test_a_container_without_its_number_is_not_alone() -> None:
    where = "the container platform's variables: "
    with pytest.raises(UserError) as mistake:
        find_placement({"SING_WORLD_SIZE": "2"})
    assert str(mistake.value) == (
        f"{where}SING_WORLD_SIZE=2 is set in the environment, but not SING_RANK, SING_JOB_NAME, SING_HOSTNAME_SUFFIX, "
        f"SING_MASTER_ADDR: set all of them, or unset SING_WORLD_SIZE to be on your own"
    )
    rest = {k: v for k, v in here().items() if k != "SING_RANK"}
    with pytest.raises(UserError) as mistake:
        find_placement(rest)
    assert str(mistake.value) == (
        f"{where}{', '.join(f'{k}={rest[k]}' for k in platforms.CONTAINER[1:])} are set in the environment, but not "
        f"SING_RANK: set all of them, or unset {', '.join(platforms.CONTAINER[1:])} to be on your own"
    )


def test_a_rank_that_is_another_machines_is_told(names: dict[str, str]) -> None:
    names["train-1.localhost"] = "192.0.2.1"
    with pytest.raises(
        UserError, match=r"SING_RANK=1: train-1\.localhost is 192\.0\.2\.1, which is no address of this"
    ):
        container(here())


def test_the_master_may_have_another_name(names: dict[str, str]) -> None:
    names["master"] = names["train-0.localhost"]
    place = container({**here(), "SING_MASTER_ADDR": "master"})
    assert place is not None
    assert place.head == "train-0.localhost"


def test_a_stop_before_training_ends_the_container(tmp_path: Path) -> None:
    waiting = {**here(), "SING_WORLD_SIZE": "2", "EXPERIMENT": "synthetic", "PYTHONPATH": str(ROOT)}
    node = Node(["env", f"--chdir={tmp_path}", sys.executable, str(ENTRY)], waiting)
    wait_until(lambda: any("mingpt.preflight" in command for command in node.processes().values()), "the preflight")
    node.process.send_signal(signal.SIGTERM)
    assert node.wait() == 75
    node.assert_nothing_left()


# --- two containers ---


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    with hosts({"one": "10.98.0.10", "two": "10.98.0.11"}, names=NAMES) as net:
        yield net


def start(net: Net, folder: Path, rank: int, environment: Mapping[str, str]) -> Node:
    command = [*net.enter(["one", "two"][rank]), "env", f"--chdir={folder}", sys.executable, str(ENTRY)]
    return Node(command, {"PYTHONPATH": str(ROOT), **environment})


@pytest.mark.slow
@needs_hosts
def test_two_containers_train_without_arguments_as_one_process_would(
    net: Net, undisturbed: Callable[..., Run], tmp_path: Path, text: Path, cache: Path
) -> None:
    run = Run(str(tmp_path / "run"), text, cache)
    wishes = {"RUN_DIR": run.dir, "EXPERIMENT": "shakespeare_10m"}
    wishes["OVERRIDES"] = " ".join((*TINY, f"data.path={text}", f"data.cache_dir={cache}"))
    nodes = [start(net, tmp_path, rank, {**variables(rank), **wishes}) for rank in (1, 0)]
    assert [node.wait() for node in nodes] == [0, 0], nodes[1].output + nodes[0].output
    assert "preflight" in nodes[0].output
    assert f"--rdzv-endpoint=train-0.{SUFFIX}:29500" in nodes[0].output
    assert f"--local-addr=train-1.{SUFFIX}" in nodes[0].output
    assert run.digest() == undisturbed("experiment=shakespeare_10m").digest()


@pytest.mark.slow
@needs_hosts
def test_a_container_with_the_rank_of_another_ends_at_once(net: Net, tmp_path: Path) -> None:
    node = start(net, tmp_path, 0, {**variables(1), "EXPERIMENT": "synthetic"})
    assert node.wait() == 64
    assert f"SING_RANK=1: train-1.{SUFFIX} is 10.98.0.11, which is no address of this machine" in node.output


# --- the image ---


def test_the_dockerfile_has_nothing_to_complain_of() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([str(hadolint), "recipes/container/Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
