"""recipes/container/: two containers with names in a DNS, started as a job platform does, and what it may get wrong."""

import signal
import sys
from pathlib import Path

import pytest

from mingpt.errors import UserError
from mingpt.world import platforms
from mingpt.world.platforms import find_placement, sing
from tests.kits.net_kit import hosts, needs_hosts
from tests.kits.node_kit import Node, wait_until
from tests.kits.paths_kit import ROOT, ran
from tests.kits.run_kit import TINY, NewRun, Run
from tests.kits.told import Told

ENTRY = ROOT / "recipes/container/dist.py"
SUFFIX = "pods.cluster.local"
NAMES = {f"train-{rank}.{SUFFIX}": f"10.98.0.1{rank}" for rank in (0, 1)}


def variables(rank: int, **changed: str) -> dict[str, str]:
    """What the platform sets in one of two containers."""
    told = {"RANK": rank, "WORLD_SIZE": 2, "JOB_NAME": "train", "HOSTNAME_SUFFIX": SUFFIX}
    told["MASTER_ADDR"] = f"train-0.{SUFFIX}"
    return {**{f"SING_{name}": str(value) for name, value in told.items()}, **changed}


# --- what the launcher makes of the variables, with names that mean this machine ---


def here(**changed: str) -> dict[str, str]:
    return variables(1, SING_HOSTNAME_SUFFIX="localhost", SING_MASTER_ADDR="train-0.localhost", **changed)


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
    assert sing({}) is None
    names["master"] = names["train-0.localhost"]  # which may have another name
    assert sing({**here(), "SING_MASTER_ADDR": "master"}) == place


@pytest.mark.parametrize(
    "changed",
    [
        {"SING_RANK": "2"},
        {"SING_RANK": "x"},
        {"SING_HOST_ADDR": "train-0.localhost"},
        {"SING_JOB_NAME": "other"},
        {"SING_MASTER_ADDR": "train-1.localhost"},
        {"SING_HOSTNAME_SUFFIX": "elsewhere"},  # which is no address of this machine
    ],
    ids=str,
)
def test_what_does_not_agree_is_told(changed: dict[str, str], names: dict[str, str], told: Told) -> None:
    names |= {"train-1.elsewhere": "192.0.2.1", "train-0.elsewhere": "127.0.0.1"}
    with told.mistake():
        sing({**here(), **changed})


@pytest.mark.parametrize("name", sorted(here()))
def test_a_variable_that_is_missing_or_empty_is_named(name: str, names: dict[str, str]) -> None:
    """One without its number is not alone either."""
    for environment in ({k: v for k, v in here().items() if k != name}, here() | {name: ""}):
        with pytest.raises(UserError, match=f", but not {name}: "):
            find_placement(environment)
    assert find_placement(dict.fromkeys(here(), "")) is None


@pytest.mark.slow
def test_a_stop_before_training_ends_the_container(tmp_path: Path) -> None:
    waiting = {**here(), "EXPERIMENT": "synthetic", "PYTHONPATH": str(ROOT)}
    node = Node(["env", f"--chdir={tmp_path}", sys.executable, str(ENTRY)], waiting)
    wait_until(lambda: any("mingpt.preflight" in command for command in node.processes().values()), "the preflight")
    node.process.send_signal(signal.SIGTERM)
    assert node.wait() == 75
    node.assert_nothing_left()


# --- two containers ---


@pytest.mark.slow
@needs_hosts
def test_two_containers_train_without_arguments_as_one_process_would(
    undisturbed: NewRun, tmp_path: Path, text: Path, cache: Path
) -> None:
    run = Run(str(tmp_path / "run"), text, cache)
    wishes = {"PYTHONPATH": str(ROOT), "RUN_DIR": run.dir, "EXPERIMENT": "shakespeare_10m"}
    wishes["OVERRIDES"] = " ".join((*TINY, f"data.path={text}", f"data.cache_dir='{cache}/of two'"))
    command = ["env", f"--chdir={tmp_path}", sys.executable, str(ENTRY)]
    with hosts({"one": "10.98.0.10", "two": "10.98.0.11"}, names=NAMES) as net:
        second, first = (
            Node([*net.enter(host), *command], {**variables(rank), **wishes}) for rank, host in ((1, "two"), (0, "one"))
        )
        assert [first.wait(), second.wait()] == [0, 0], first.output + second.output
    assert "preflight" in second.output
    assert f"--rdzv-endpoint=train-0.{SUFFIX}:29500" in second.output
    assert f"--local-addr=train-1.{SUFFIX}" in second.output
    assert run.digest() == undisturbed("experiment=shakespeare_10m").digest()


# --- the image ---


def test_the_dockerfile_has_nothing_to_complain_of() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = ran([str(hadolint), "recipes/container/Dockerfile"], cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "")
