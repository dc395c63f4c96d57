"""A run on one machine's disk, without a bucket or a common folder: the same bits, and files on that disk alone.

Each machine of a test has a disk, a memory and a host name of its own; `run.dir` is the relative runs/x on all of them.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from mingpt.tiers.hot import find_run_id
from tests.kits.disk_kit import OPENED, RUN, SHAPE, Ended, Machine, Nodes, machines, train
from tests.kits.node_kit import needs_mount
from tests.kits.run_kit import NewRun, Run
from tests.kits.snapshot_kit import files
from tests.kits.verb_kit import mingpt

pytestmark = [pytest.mark.slow, needs_mount]

SHORT = ("train.max_steps=12", "world.timeout_seconds=60", "world.init_timeout_seconds=120")
HOT = "snapshot.hot_every_steps=2"
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
    before = [(machine.files(), machine.hot_files()) for machine, _ in nodes]
    ended = train(nodes, run.arguments(*overrides))
    assert ended.codes == [[64] * each for _, each in nodes], ended.output
    assert [(machine.files(), machine.hot_files()) for machine, _ in nodes] == before
    return ended


def marker(machine: Machine) -> Any:
    return json.loads((machine.disk / MARKER).read_text())


def id_of(machine: Machine) -> str | None:
    return find_run_id(f"{machine.disk}/{RUN}")


def resumed(ended: Ended) -> list[int]:
    return [int(step) for step in re.findall(r"resumed from step (\d+) of ", ended.output)]


def only_marker(machine: Machine) -> Any:
    """What the only file on a machine's disk says."""
    assert [*machine.files()] == [MARKER]
    return marker(machine)


def told(of: Machine, attempt: int, step: int) -> dict[str, Any]:
    """What a marker says of the machine that has the run."""
    return {"run": id_of(of), "host": of.name, "attempt": attempt, "step": step}


@pytest.mark.example
def test_all_files_are_the_heads(four: list[Machine], run: Run, undisturbed: NewRun) -> None:
    """Two nodes with two processes and one. The head is SkyPilot's node 0, which is torchrun's node 1 here."""
    ada, bob, *_ = four
    alone = undisturbed(*SHORT)  # first: it also makes the data's cache
    ended = finished([(bob, 1), (ada, 2)], run, head=ada)
    # Parts, claims, journal, metrics, config.yaml, run-id.
    assert files(ada.disk) == [f"{RUN}/{name}" for name in files(Path(alone.dir))]
    assert only_marker(bob) == told(ada, 1, 12)
    opened = {line.removeprefix(OPENED) for line in ended.said["bob"].splitlines() if line.startswith(OPENED)}
    assert opened == {RUN, f"{RUN}/.probe-*", ".elsewhere.json.*.tmp"}  # nor does it read anything
    assert ada.digests() == digests(alone)
    assert f"run.dir={RUN} is on ada's disk alone" in ended.said["ada"]
    [entry] = mingpt.json("snapshots show", ada.disk / RUN)["history"]
    assert entry["disk"] == "ada"
    assert mingpt.json("snapshots show", alone.dir)["history"][0].get("disk") is None


def test_nodes_come_and_go_and_the_machine_with_the_run_is_a_worker_node_now(
    four: list[Machine], run: Run, expected: dict[int, str]
) -> None:
    """torchrun, and SkyPilot's head, say otherwise: whole nodes are moved, so that sums still travel in two hops."""
    ada, bob, cyd, _ = four
    run.overrides = (*run.overrides, "snapshot.verify_after_write=true", "snapshot.asynchronous=true")
    finished([(ada, 1)], run, until(4))
    ended = finished([(bob, 2), (ada, 2)], run, until(8), head=bob)
    assert resumed(ended) == [4]
    said = {name: sorted(line for line in text.splitlines() if "as rank" in line) for name, text in ended.said.items()}
    ranks = {"ada": (0, 1), "bob": (2, 3)}
    assert said == {name: [SHAPE.format(rank=r, shape=(2, 2)) for r in those] for name, those in ranks.items()}
    assert resumed(finished([(cyd, 1), (ada, 1)], run)) == [8]
    assert ada.digests() == expected
    assert [only_marker(bob), only_marker(cyd)] == [told(ada, 2, 8), told(ada, 3, 12)]


def killed(nodes: Nodes, run: Run, step: int) -> None:
    """All processes are killed after this step, which is in the memory of each node."""
    ended = train(nodes, run.arguments(HOT), killed_after=step)
    assert ended.codes == [[-9] * each for _, each in nodes], ended.output
    assert [max(machine.hot_steps()) for machine, _ in nodes] == [step] * len(nodes)


def test_without_the_machine_that_has_it(four: list[Machine], run: Run, expected: dict[int, str]) -> None:
    """No second run begins silently, and what the others have in memory, perhaps the only copies, stays."""
    ada, bob, cyd, _ = four
    killed([(ada, 1), (bob, 1)], run, 6)
    assert only_marker(bob) == told(ada, 1, 4)
    in_memory = bob.hot_files()
    ended = refused([(cyd, 1), (bob, 1)], run, HOT)
    assert re.search(rf"error: .*run\.dir={RUN}\b.*\bada\b.*\bstep 4\b.*\bbob\b.*\bstep 6\b", ended.output), (
        ended.output
    )
    for way_out in ("copy its folder", "run.name", "resume.anew=true", f"/dev/shm/mingpt-{os.getuid()}/x-"):
        assert way_out in ended.output
    refused([(bob, 1)], run, HOT)  # nor alone

    assert resumed(finished([(cyd, 1), (bob, 1)], run, HOT, "resume.anew=true")) == []
    assert id_of(cyd) not in (None, id_of(ada))
    assert only_marker(bob) == told(cyd, 1, 12)
    assert cyd.digests() == expected
    assert bob.hot_files() == in_memory

    ended = refused([(ada, 1), (cyd, 1)], run)  # it is back: two runs under one name
    assert re.search(rf"error: .*run\.dir={RUN}\b.*\bada\b.*\bcyd\b", ended.output), ended.output
    ended = refused([(ada, 1), (bob, 1)], run)
    assert re.search(rf"error: .*run\.dir={RUN}\b.*\bcyd\b.*\bstep 12\b", ended.output), ended.output


def test_the_machine_with_the_run_is_lost_at_once(four: list[Machine], run: Run) -> None:
    """While observers open, which may take long: a tracker asks its server. bob never had anything of the run."""
    ada, bob, *_ = four
    finished([(ada, 1)], run, until(4))
    for machine in (ada, bob):
        (machine.disk / "lost.py").write_text("import os\ndef lost(**settings): os.kill(os.getpid(), 9)\n")
    ended = train([(bob, 1), (ada, 1)], run.arguments("observers=[{_target_: lost.lost}]"))
    assert ended.codes == [[70], [-9]], ended.output
    assert marker(bob) == told(ada, 2, 4)
    refused([(bob, 1)], run)


@pytest.mark.nightly
def test_what_another_nodes_memory_has(four: list[Machine], run: Run, expected: dict[int, str]) -> None:
    """The machine with the disk was switched off and on: step 6, in slices of both, is in the other one's memory."""
    ada, bob, *_ = four
    killed([(ada, 1), (bob, 2)], run, 6)
    with machines(ada.disk.parent, "ada") as (again,):
        ended = finished([(bob, 2), (again, 1)], run, HOT)
        assert resumed(ended) == [6]
        assert again.digests() == expected
        assert only_marker(bob)
        assert [again.hot_files(), bob.hot_files()] == [{}, {}]  # the run has finished


@pytest.mark.nightly
def test_what_only_another_nodes_memory_has(four: list[Machine], run: Run, expected: dict[int, str]) -> None:
    """The disk is lost. The way out that the message names: its step is copied, and the run goes on from there."""
    ada, bob, *_ = four
    killed([(ada, 1), (bob, 1)], run, 6)
    said = refused([(bob, 1)], run, HOT).output
    named = re.search(r"bob keeps step 6 in its memory, in /dev/shm/(\S+):", said)
    assert named, said
    step = "step-000000006"
    shutil.copytree(bob.memory / named[1] / step, bob.disk / RUN / "snapshots" / step)
    assert resumed(finished([(bob, 1)], run, "resume.anew=true")) == [6]
    assert bob.digests().items() >= {step: expected[step] for step in (8, 12)}.items()
    assert MARKER not in bob.files()


def test_the_newest_claim_decides(four: list[Machine], run: Run, expected: dict[int, str]) -> None:
    """Copies of the folder lie elsewhere: an older one, and one from before a rewind, whose step is higher."""
    ada, bob, cyd, _ = four
    finished([(cyd, 1)], run, until(4))
    shutil.copytree(cyd.disk / RUN, ada.disk / RUN)
    assert resumed(finished([(ada, 1), (cyd, 1)], run, until(8))) == [4]  # of equal ones the first node's
    assert [ada.digests().keys(), cyd.digests().keys()] == [{8, 4}, {4}]
    shutil.copytree(ada.disk / RUN, bob.disk / RUN)
    mingpt("snapshots rewind", ada.disk / RUN, "--step", 4)
    old = bob.files()
    ended = finished([(bob, 1), (cyd, 1), (ada, 1)], run)
    assert resumed(ended) == [4]
    assert ada.digests() == expected
    assert {name: raw for name, raw in bob.files().items() if name != MARKER} == old
    assert [marker(bob), marker(cyd)] == [told(ada, 4, 12)] * 2
    refused([(bob, 1), (cyd, 1)], run, until(16))


@pytest.mark.nightly
def test_two_of_three_share_a_disk(four: list[Machine], run: Run, expected: dict[int, str]) -> None:
    ada, bob, cyd, dan = four
    bob.disk = ada.disk
    ended = finished([(cyd, 1), (bob, 1), (ada, 1)], run, until(4), head=ada)
    assert only_marker(cyd)
    ended = finished([(cyd, 1), (dan, 1), (bob, 1)], run)  # one of the two is enough
    assert resumed(ended) == [4]
    assert bob.digests() == expected
    assert MARKER not in bob.files()
    assert [only_marker(cyd), only_marker(dan)] == [told(bob, 2, 12)] * 2


def test_snapshots_that_all_see(four: list[Machine], run: Run, tmp_path: Path, expected: dict[int, str]) -> None:
    """All write them, their claims are on one disk, and they survive that (docs/snapshots.md)."""
    ada, bob, *_ = four
    bob.umask = 0o027
    there = Store(f"{tmp_path}/snapshots")
    run.overrides = (*run.overrides, f"snapshot.dir={there.url}")
    finished([(ada, 1), (bob, 1)], run, until(4))
    assert {path.stat().st_mode & 0o777 for path in Path(there.root).rglob("*.safetensors")} == {0o644, 0o640}
    assert resumed(finished([(bob, 1), (ada, 1)], run, until(8))) == [4]
    assert only_marker(bob)
    assert sorted(name for name in ada.files() if "/attempts/" in name) == [
        f"{RUN}/attempts/00001.json", f"{RUN}/attempts/00002.json",
    ]  # fmt: skip
    found = {step: read(there, step).manifest.digest for step in there.steps()}
    refused([(bob, 1)], run)
    assert resumed(finished([(bob, 1)], run, "resume.anew=true")) == [8]
    assert found | {12: read(there, 12).manifest.digest} == expected


@pytest.mark.nightly
def test_a_damaged_snapshot(four: list[Machine], run: Run, expected: dict[int, str]) -> None:
    """Who does not see the disk finds nothing wrong with it."""
    ada, bob, *_ = four
    finished([(ada, 1), (bob, 1)], run, until(8))
    part = next(path for path in (ada.disk / RUN / "snapshots/step-000000008").iterdir() if path.suffix != ".json")
    raw = bytearray(part.read_bytes())
    raw[-1] ^= 1
    part.write_bytes(raw)
    ended = finished([(bob, 1), (ada, 1)], run)
    assert resumed(ended) == [4]
    assert ended.output.count("DAMAGED SNAPSHOT") == ended.said["ada"].count("DAMAGED SNAPSHOT") == 1
    assert ada.digests() == expected
    assert only_marker(bob)


# --- odd places and odd nodes: read-only ones, links, two starts at once ---


def on(machine: Machine, *command: str) -> None:
    subprocess.run([*machine.enter(), *command], check=True)


def test_read_only_workers(four: list[Machine], run: Run) -> None:
    """One with a disk of its own, and one of two that share a disk."""
    ada, bob, cyd, _ = four
    bob.disk = ada.disk
    for machine in (ada, cyd):
        (machine.disk / RUN).mkdir(parents=True)
        on(machine, "mount", "--bind", RUN, RUN)
        on(machine, "mount", "-o", "remount,ro,bind", RUN)
    finished([(cyd, 1), (ada, 1), (bob, 1)], run)
    assert [*cyd.files()] == []


# run.dir, another setting, and where it is on a machine's disk.
PLACES = [
    ("file://{disk}/url", "", "own/url"),
    ("runs/link", "", "real/target"),
    (RUN, "snapshot.dir=scratch/snaps", RUN),
    *(
        pytest.param(place, "", there, marks=pytest.mark.nightly)
        for place, there in (("runs/../x", "x"), ("{disk}/abs", "own/abs"), ("link/x", "real/x"))
    ),
]


@pytest.mark.parametrize(("run_dir", "setting", "there"), PLACES)
def test_odd_places(run_dir: str, setting: str, there: str, four: list[Machine], text: Path, cache: Path) -> None:
    ada, bob, *_ = four
    # An absolute path is another place on each machine
    here = ada.disk.parent / "mnt"
    here.mkdir()
    for machine in (ada, bob):
        (machine.disk / "real/target").mkdir(parents=True)
        (machine.disk / "runs").mkdir()
        (machine.disk / "link").symlink_to("real")
        (machine.disk / "runs/link").symlink_to("../real/target")
        (machine.disk / "own").mkdir()
        on(machine, "mount", "--bind", str(machine.disk / "own"), str(here))
    run = Run(run_dir.format(disk=here), text, cache, (*SHORT, *setting.split()))
    finished([(ada, 1), (bob, 1)], run, until(4))
    assert resumed(finished([(bob, 1), (ada, 1)], run)) == [4]
    assert [*bob.files()] == [f"{there}/elsewhere.json"]


def test_two_jobs_at_once(four: list[Machine], run: Run) -> None:
    ada, bob, *_ = four
    with ThreadPoolExecutor(2) as pool:
        both = [*pool.map(lambda _: train([(ada, 1), (bob, 1)], run.arguments(until(150))), range(2))]
    assert only_marker(bob)
    assert sorted(code for ended in both for (code,) in ended.codes) == [0, 0, 64, 64], both
