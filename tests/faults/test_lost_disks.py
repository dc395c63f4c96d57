"""Faults of a run on one machine's disk: who is killed, what the others do, and that the bits stay.

Under real torchrun. The run has begun on `bob`, which is the launchers' node 1: the store that the processes meet in
is on `ada`, so that both points of failure can be lost alone.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mingpt.tiers.hot import find_run_id
from tests.kits.disk_kit import RUN, Machine, machines, train
from tests.kits.fault_kit import LAUNCHERS, LIMITS, LONG, Cluster
from tests.kits.node_kit import needs_mount
from tests.kits.run_kit import NewRun, Run

pytestmark = [pytest.mark.slow, needs_mount]

ADA, BOB = 0, 1
KILLED = -signal.SIGKILL
MARKER = f"{RUN}/elsewhere.json"


@pytest.fixture
def two(tmp_path: Path, text: Path, cache: Path) -> Iterator[tuple[Run, Machine, Machine]]:
    """A run that has begun on the second of two machines, which are in its folder now."""
    run = Run(RUN, text, cache)
    with machines(tmp_path, "ada", "bob") as (ada, bob):
        begun = train([(bob, 1)], run.arguments(*LONG, "train.max_steps=20"))
        assert begun.codes == [[0]], begun.output
        yield run, ada, bob


def strikes(cluster: Cluster, *plan: tuple[int, Callable[[], None]]) -> list[int]:
    """Does each at its step, in this order; returns the steps, as they come."""
    happened = list[int]()

    def on_step(step: int) -> None:
        if len(happened) < len(plan) and step >= plan[len(happened)][0]:
            happened.append(step)
            plan[len(happened) - 1][1]()

    cluster.on_step = on_step
    return happened


def attempt_and_step(machine: Machine) -> tuple[int, int]:
    """What the only file on a machine's disk says; the run is bob's."""
    assert [*machine.files()] == [MARKER]
    told = json.loads((machine.disk / MARKER).read_text())
    bob = machine.disk.with_name("disk-of-bob") / RUN
    assert (told["run"], told["host"]) == (find_run_id(str(bob)), "bob")
    return told["attempt"], told["step"]


def ended_equal(two: tuple[Run, Machine, Machine], undisturbed: NewRun) -> bool:
    reference = Run(undisturbed(*LONG).dir, two[0].text, two[0].cache)
    return two[2].digests()[150] == reference.digest()


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(one, marks=[pytest.mark.nightly] * (one != "mingpt.launch static")) for one in LAUNCHERS],
)
def test_workers_are_killed(launcher: str, two: tuple[Run, Machine, Machine], undisturbed: NewRun) -> None:
    """ada's agent sees progress, or it would give up at the second one in a row: it reads ada's disk alone.

    torchrun has one restart.
    """
    run, ada, bob = two
    cluster = Cluster(launcher, run, (1, 2), machines=(ada, bob))

    def kill(node: int) -> None:
        os.kill(cluster.nodes[node].workers()[-1], signal.SIGKILL)

    plan = [(50, lambda: kill(ADA)), (70, lambda: kill(ADA)), (90, lambda: kill(BOB))]
    plan = plan if launcher.startswith("mingpt.launch") else plan[:1]
    happened = strikes(cluster, *plan)
    cluster.start()
    assert cluster.wait() == (0, 0), cluster.output[-9000:]
    assert len(happened) == len(plan)
    assert len(cluster.resumed_from()) == len(plan) + 1
    assert ended_equal(two, undisturbed)
    assert attempt_and_step(ada) == (2 + len(plan), 150)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("launcher", "lost", "codes"),
    [
        ("mingpt.launch c10d", BOB, (64, KILLED)),
        ("mingpt.launch static", ADA, (KILLED, 70)),
        ("mingpt.launch c10d", ADA, (KILLED, 70)),
    ],
)
def test_a_machine_is_lost(
    launcher: str, lost: int, codes: tuple[int, int], two: tuple[Run, Machine, Machine], undisturbed: NewRun
) -> None:
    """That with the run: the other one would be enough (--nnodes=1:2), and must not begin a second run. That with the
    store: no launcher can go on, and the run is where it was.
    """
    run, ada, bob = two
    seconds, least = (300, 1) if lost == BOB else (60, 2)
    cluster = Cluster(launcher, run, machines=(ada, bob), meet_seconds=seconds, least=least)
    happened = strikes(cluster, (50, lambda: cluster.nodes[lost].kill()))
    cluster.start()
    assert cluster.wait() == codes, cluster.output[-9000:]
    assert happened
    if lost == BOB:
        said = cluster.nodes[ADA].output
        assert re.search(rf"launch: exit code 64: .*run\.dir={RUN}\b.*\bbob\b.*\bstep 40\b", said), said[-4000:]
        assert attempt_and_step(ada) == (2, 40)
    again = train([(ada, 1), (bob, 1)], run.arguments(*LONG, *LIMITS))
    assert again.codes == [[0], [0]], again.output
    assert "resumed from step 40 of " in again.output
    assert ended_equal(two, undisturbed)
