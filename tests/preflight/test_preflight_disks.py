"""The preflight of two machines with disks of their own."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.kits.disk_kit import RUN, Machine, machines
from tests.kits.node_kit import Node, free_port, needs_mount
from tests.kits.report_kit import Made

pytestmark = [pytest.mark.slow, needs_mount]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[Machine]]:
    with machines(tmp_path, "ada", "bob") as made:
        yield made


def preflight(two: list[Machine], *overrides: str, second: Sequence[str] = ()) -> tuple[list[int], str]:
    """second: what stands before the second one's command."""
    port, nodes = free_port(), []
    for rank, machine in enumerate(two):
        options = ["--nnodes=2", f"--node-rank={rank}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        command = [sys.executable, "-m", "mingpt.preflight", *options, "data=random", *overrides]
        nodes.append(Node([*machine.enter(), *(second if rank else ()), *command]))
    codes = [node.wait() for node in nodes]
    return codes, "".join(node.output for node in nodes)


def test_a_url_of_a_disk(two: list[Machine], tmp_path: Path) -> None:
    """Training takes it (test_odd_places)."""
    here = tmp_path / "mnt"
    here.mkdir()
    for machine in two:
        (machine.disk / "own").mkdir()
        subprocess.run([*machine.enter(), "mount", "--bind", str(machine.disk / "own"), str(here)], check=True)
    codes, said = preflight(two, f"run.dir=file://{here}/x")
    assert codes == [0, 0], said


@pytest.mark.parametrize("has_the_run", [False, True])
def test_a_node_that_cannot_write(has_the_run: bool, two: list[Machine]) -> None:
    """Training goes on if the run is not on that node's disk (test_read_only_workers)."""
    bob = two[1]
    if has_the_run:
        Made(bob.disk / RUN).claim(1, 0)
    else:
        (bob.disk / RUN).mkdir(parents=True)
    subprocess.run([*bob.enter(), "mount", "--bind", RUN, RUN], check=True)
    subprocess.run([*bob.enter(), "mount", "-o", "remount,ro,bind", RUN], check=True)
    codes, said = preflight(two, f"run.dir={RUN}")
    assert codes == [64, 64] if has_the_run else [0, 0], said
    assert f"{'problem' if has_the_run else 'warning'} on bob (run.dir): run.dir=runs/x" in said
    assert "problem on ada" not in said
    assert ("ada's disk alone" in said) != has_the_run


def test_a_store_that_one_node_has_no_package_for(two: list[Machine], tmp_path: Path) -> None:
    """As with a missing s3fs. The cause is told once, and a recipe does not try again."""
    block = "import sys; sys.modules['fsspec.implementations.memory'] = None"
    (tmp_path / "sitecustomize.py").write_text(block)
    codes, said = preflight(two, "run.dir=memory://x/run", second=["env", f"PYTHONPATH={tmp_path}"])
    assert codes == [64, 64], said
    bad = [line for line in said.splitlines() if line.startswith(("problem", "unreachable"))]
    assert len(bad) == 2, said  # the same line in both nodes' output
    assert bad[0] == bad[1]
    assert bad[0].startswith("problem on bob (run.dir): run.dir=memory://x/run: "), said
