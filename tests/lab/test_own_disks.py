"""The recipes' own commands, without a RUN_DIR, on nodes with disks of their own: the run lives on one of them.

SkyPilot can't resize a cluster on Slurm: it is taken down, and the next one has the same disks.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from tests.lab.lab_kit import SMALL, disk, drained, install_once, needs_lab, own_disks, sky, undisturbed

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(5400), needs_lab]

# A step's state does not depend on where the run ends.
TINY = (*SMALL, "schedule=constant", "snapshot.keep=1000")
FOUR = ("--num-nodes", "4", "--gpus", "L4:4", "--cpus", "8+")
NODES = range(1, 7)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digests of one process, by step."""
    folder = tmp_path_factory.mktemp("alone")
    undisturbed(folder, "shakespeare_10m", (*TINY, "train.max_steps=48"))
    return digests(folder / "alone")


def digests(run: Path) -> dict[int, str]:
    store = Store(f"{run}/snapshots")
    return {step: read(store, step).manifest.digest for step in store.steps()}


def files(node: int) -> list[str]:
    return sorted(str(path.relative_to(disk(node))) for path in disk(node).rglob("*") if path.is_file())


def the_run(*, of: int) -> Path:
    """The only one on this node's disk."""
    (run,) = disk(of).iterdir()
    return run


def steps(number: int) -> list[str]:
    return ["--env", f"OVERRIDES={' '.join((*TINY, f'train.max_steps={number}'))}"]


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[str]:
    """A cluster's name; taken down at the end."""
    install_once()
    with own_disks(request.param):
        yield request.param
        sky("down", "-y", request.param, check=False)


@pytest.mark.parametrize("cluster", ["train"], indirect=True)
def test_one_node_then_three_then_two_and_none_that_has_the_run(cluster: str, alone: dict[int, str]) -> None:
    launch = ("launch", "-y", "-c", cluster, "recipes/train.yaml")
    with drained(1):
        done = sky(*launch, *steps(16))
    assert "1 process on cpu" in done.stdout
    assert digests(the_run(of=2)) == {step: alone[step] for step in (8, 16)}
    sky("down", "-y", cluster)

    # n1 is the head now, and the run is on n2.
    done = sky(*launch, "--num-nodes", "3", *steps(32))
    assert "resumed from step 16" in done.stdout
    assert "3 processes on cpu (gloo)" in done.stdout
    done = sky(*launch, "--num-nodes", "2", *steps(48))
    assert "resumed from step 32" in done.stdout
    assert "2 processes on cpu (gloo)" in done.stdout
    assert digests(the_run(of=2)) == alone
    marker = f"{the_run(of=2).name}/elsewhere.json"
    assert {node: files(node) for node in NODES if node != 2} == {1: [marker], 3: [marker], 4: [], 5: [], 6: []}

    # A new disk in n2: nobody begins the run again.
    shutil.rmtree(the_run(of=2))
    done = sky("exec", cluster, "recipes/train.yaml", "--num-nodes", "3", *steps(48), check=False)
    assert done.returncode != 0
    assert re.search(rf"{marker.partition('/')[0]}.*\bn2\b", done.stdout), done.stdout[-4000:]
    assert re.search(r"exit ?code +(: )?64", done.stdout)
    assert {node: files(node) for node in NODES} == {1: [marker], 2: [], 3: [marker], 4: [], 5: [], 6: []}


@pytest.mark.parametrize("cluster", ["train-rdzv"], indirect=True)
def test_two_nodes_by_rendezvous_then_sixteen_processes(cluster: str, alone: dict[int, str]) -> None:
    launch = ("launch", "-y", "-c", cluster, "recipes/train-rdzv.yaml")
    with drained(1):
        done = sky(*launch, *steps(16))
    assert "2 processes on cpu (gloo)" in done.stdout
    holders = [node for node in (2, 3) if (the_run(of=node) / "snapshots").exists()]
    assert holders == [2]  # the head
    sky("down", "-y", cluster)

    done = sky(*launch, *FOUR, *steps(32))
    assert "resumed from step 16" in done.stdout
    assert "16 processes on cpu (gloo), 16 microbatches of 4 x 32 tokens" in done.stdout
    assert digests(the_run(of=2)) == {step: alone[step] for step in (8, 16, 24, 32)}
    marker = f"{the_run(of=2).name}/elsewhere.json"
    assert [files(node) for node in (1, 3, 4)] == [[marker]] * 3
