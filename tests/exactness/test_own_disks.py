"""A run on one machine's disk, without a bucket or a common folder: the same bits, and files on that disk alone.

Each machine of a test has a disk, a memory and a host name of its own; `run.dir` is the relative runs/x on all of them.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from disk_kit import RUN, SHAPE, Ended, Machine, Nodes, machines, train
from mingpt.snapshot.hot import find_run_id
from node_kit import needs_mount
from run_kit import NewRun, Run
from snapshot_kit import contents, files
from verb_kit import mingpt

pytestmark = [pytest.mark.slow, needs_mount]

SHORT = ("train.max_steps=12", "world.timeout_seconds=60", "world.init_timeout_seconds=120")
HOT = ("snapshot.hot_every_steps=2",)
MARKER = f"{RUN}/elsewhere.json"


@pytest.fixture
def four(tmp_path: Path) -> Iterator[list[Machine]]:
    with machines(tmp_path, "ada", "bob", "cyd", "dan") as made:
        yield made


@pytest.fixture
def run(text: Path, cache: Path) -> Run:
    return Run(RUN, text, cache, SHORT)


@pytest.fixture
def expected(undisturbed: NewRun) -> dict[int, str]:
    """The digest of each step that one process alone has stored."""
    return digests(undisturbed(*SHORT))


def digests(run: Run) -> dict[int, str]:
    return {step: mingpt.json("snapshots show", run.dir, "--step", step)["digest"] for step in run.store.steps()}


def until(step: int) -> str:
    return f"train.max_steps={step}"


def finished(nodes: Nodes, run: Run, *overrides: str, head: Machine | None = None) -> Ended:
    ended = train(nodes, run.arguments(*overrides), head=head)
    assert ended.codes == [[0] * each for _, each in nodes], ended.output
    return ended


def refused(nodes: Nodes, run: Run, *overrides: str) -> Ended:
    """All of them end with 64, and no disk and no memory has changed."""
    before = [(contents(machine.disk), machine.memory) for machine, _ in nodes]
    ended = train(nodes, run.arguments(*overrides))
    assert ended.codes == [[64] * each for _, each in nodes], ended.output
    assert [(contents(machine.disk), machine.memory) for machine, _ in nodes] == before
    return ended


def marker(machine: Machine) -> Any:
    return json.loads((machine.disk / MARKER).read_text())


def id_of(machine: Machine) -> str | None:
    return find_run_id(f"{machine.disk}/{RUN}")


def resumed(ended: Ended) -> list[int]:
    return [int(step) for step in re.findall(r"resumed from step (\d+) of ", ended.output)]


def only_marker(machine: Machine) -> bool:
    return machine.files == [MARKER]


def test_all_files_are_the_heads(four: list[Machine], run: Run, tmp_path: Path, expected: dict[int, str]) -> None:
    """Two nodes with two processes and one. The head is SkyPilot's node 0, which is torchrun's node 1 here."""
    ada, bob, *_ = four
    ended = finished([(bob, 1), (ada, 2)], run, head=ada)
    shared = Run(str(tmp_path / "shared" / "runs" / "x"), run.text, run.cache, run.overrides)
    shared.finish(3)
    assert files(ada.disk / RUN) == files(Path(shared.dir))  # parts, claims, journal, metrics, config.yaml, run-id
    assert files(ada.disk) == [f"{RUN}/{name}" for name in files(Path(shared.dir))]
    assert only_marker(bob)
    assert marker(bob) == {"run": id_of(ada), "host": "ada", "attempt": 1, "step": 12}
    assert ada.digests() == expected == digests(shared)
    assert f"run.dir={RUN} is on ada's disk alone" in ended.said["ada"]
    [entry] = mingpt.json("snapshots show", ada.disk / RUN)["history"]
    assert entry["disk"] == "ada"
    assert mingpt.json("snapshots show", shared.dir)["history"][0].get("disk") is None


def test_the_machine_with_the_run_is_a_worker_node_now(
    four: list[Machine], run: Run, expected: dict[int, str]
) -> None:
    """torchrun, and SkyPilot's head, say otherwise: whole nodes are moved, so that sums still travel in two hops."""
    ada, bob, *_ = four
    finished([(ada, 2), (bob, 2)], run, until(4))
    ended = finished([(bob, 2), (ada, 2)], run, head=bob)
    assert resumed(ended) == [4]
    said = {name: sorted(line for line in text.splitlines() if "as rank" in line) for name, text in ended.said.items()}
    ranks = {"ada": (0, 1), "bob": (2, 3)}
    assert said == {name: [SHAPE.format(rank=r, shape=(2, 2)) for r in those] for name, those in ranks.items()}
    assert ada.digests() == expected
    assert only_marker(bob)
    assert marker(bob) == {"run": id_of(ada), "host": "ada", "attempt": 2, "step": 12}


def test_a_node_more_and_a_node_fewer(four: list[Machine], run: Run, expected: dict[int, str]) -> None:
    ada, bob, cyd, _ = four
    finished([(ada, 1), (bob, 1)], run, until(4))
    assert resumed(finished([(cyd, 1), (bob, 1), (ada, 1)], run, until(8))) == [4]
    assert resumed(finished([(cyd, 1), (ada, 1)], run)) == [8]
    assert ada.digests() == expected
    assert [only_marker(machine) for machine in (bob, cyd)] == [True, True]
    one = {"run": id_of(ada), "host": "ada"}
    assert [marker(bob), marker(cyd)] == [one | {"attempt": 2, "step": 8}, one | {"attempt": 3, "step": 12}]


def test_without_the_machine_that_has_it(four: list[Machine], run: Run, expected: dict[int, str]) -> None:
    ada, bob, cyd, _ = four
    finished([(ada, 1), (bob, 1)], run, until(4))
    first = id_of(ada)
    ended = refused([(cyd, 1), (bob, 1)], run)
    assert re.search(rf"error: .*run\.dir={RUN}\b.*\bada\b.*\bstep 4\b", ended.output), ended.output
    for way_out in ("rsync", "run.name", "resume.anew=true"):
        assert way_out in ended.output
    assert cyd.files == []

    finished([(cyd, 1), (bob, 1)], run, "resume.anew=true")
    assert only_marker(bob)
    assert id_of(cyd) not in (None, first)
    assert marker(bob) == {"run": id_of(cyd), "host": "cyd", "attempt": 1, "step": 12}
    assert cyd.digests() == expected

    ended = refused([(ada, 1), (cyd, 1)], run)  # it is back: two runs under one name
    assert re.search(rf"error: .*run\.dir={RUN}\b.*\bada\b.*\bcyd\b", ended.output), ended.output
    assert id_of(ada) == first
