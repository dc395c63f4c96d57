"""Odd places and odd nodes of a run on one node's disk: read-only ones, links, two starts at once."""

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kits.disk_kit import RUN, Ended, Machine, machines, train
from tests.kits.node_kit import needs_mount
from tests.kits.run_kit import Run

pytestmark = [pytest.mark.slow, needs_mount]
SHORT = ("train.max_steps=12", "world.timeout_seconds=60", "world.init_timeout_seconds=60")
MARKER = f"{RUN}/elsewhere.json"


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Machine]]:
    with machines(tmp_path, "ada", "bob", "cyd") as made:
        yield made


@pytest.fixture
def run(text: Path, cache: Path) -> Run:
    return Run(RUN, text, cache, SHORT)


def on(machine: Machine, *command: str) -> None:
    subprocess.run([*machine.enter(), *command], check=True)


def test_read_only_worker(three: list[Machine], run: Run) -> None:
    ada, bob, _ = three
    (bob.disk / RUN).mkdir(parents=True)
    on(bob, "mount", "--bind", RUN, RUN)
    on(bob, "mount", "-o", "remount,ro,bind", RUN)
    ended = train([(bob, 1), (ada, 1)], run.arguments())
    assert ended.codes == [[0], [0]], ended.output
    assert [*bob.files()] == []


def test_read_only_worker_of_a_shared_disk(three: list[Machine], run: Run) -> None:
    ada, bob, cyd = three
    bob.disk = ada.disk
    (ada.disk / RUN).mkdir(parents=True)
    on(ada, "mount", "--bind", RUN, RUN)
    on(ada, "mount", "-o", "remount,ro,bind", RUN)
    ended = train([(ada, 1), (bob, 1), (cyd, 1)], run.arguments())
    assert ended.codes == [[0], [0], [0]], ended.output


@pytest.mark.parametrize(
    "run_dir",
    [
        "file://{disk}/url",
        "runs/link",
        *(pytest.param(place, marks=pytest.mark.nightly) for place in ("runs/../x", "{disk}/abs", "link/x")),
    ],
)
def test_odd_places(run_dir: str, three: list[Machine], text: Path, cache: Path) -> None:
    ada, bob, _ = three
    # An absolute path is another place on each machine
    for machine in (ada, bob):
        (machine.disk / "real/target").mkdir(parents=True)
        (machine.disk / "runs").mkdir()
        (machine.disk / "link").symlink_to("real")
        (machine.disk / "runs/link").symlink_to("../real/target")
        (machine.disk / "own").mkdir()
    here = ada.disk.parent / "mnt"
    here.mkdir()
    for machine in (ada, bob):
        on(machine, "mount", "--bind", str(machine.disk / "own"), str(here))
    place = run_dir.format(disk=here)
    run = Run(place, text, cache, SHORT)
    ended = train([(ada, 1), (bob, 1)], run.arguments("train.max_steps=4"))
    assert ended.codes == [[0], [0]], ended.output
    ended = train([(bob, 1), (ada, 1)], run.arguments())
    assert ended.codes == [[0], [0]], ended.output
    assert "resumed from step 4" in ended.output
    assert [name.rpartition("/")[2] for name in bob.files()] == ["elsewhere.json"], bob.files().keys()


def test_snapshot_dir_elsewhere_on_each(three: list[Machine], run: Run) -> None:
    ada, bob, _ = three
    run.overrides = (*run.overrides, "snapshot.dir=scratch/snaps")
    ended = train([(ada, 1), (bob, 1)], run.arguments("train.max_steps=4"))
    assert ended.codes == [[0], [0]], ended.output
    ended = train([(bob, 1), (ada, 1)], run.arguments())
    assert ended.codes == [[0], [0]], ended.output
    assert "resumed from step 4" in ended.output
    assert [*bob.files()] == [MARKER]


def test_two_jobs_at_once(three: list[Machine], run: Run) -> None:
    ada, bob, _ = three
    got = dict[str, Ended]()
    more = run.arguments("train.max_steps=150")

    def go(name: str, nodes: list[tuple[Machine, int]]) -> None:
        got[name] = train(nodes, more)

    threads = [
        threading.Thread(target=go, args=a) for a in (("one", [(ada, 1), (bob, 1)]), ("two", [(ada, 1), (bob, 1)]))
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert [*bob.files()] == [MARKER]
    codes = sorted(code for ended in got.values() for (code,) in ended.codes)
    assert codes == [0, 0, 64, 64], "".join(ended.output[-1500:] for ended in got.values())


def test_snapshots_elsewhere_survive_the_node(three: list[Machine], run: Run, tmp_path: Path) -> None:
    """docs/snapshots.md: snapshot.dir that all see, and the node with run.dir is gone."""
    ada, bob, _ = three
    run.overrides = (*run.overrides, f"snapshot.dir={tmp_path}/snapshots")
    ended = train([(ada, 1), (bob, 1)], run.arguments("train.max_steps=4"))
    assert ended.codes == [[0], [0]]
    ended = train([(bob, 1)], run.arguments())
    assert ended.codes == [[64]]
    ended = train([(bob, 1)], run.arguments("resume.anew=true"))
    assert ended.codes == [[0]]
    assert "resumed from step 4" in ended.output
