"""Which node a run lives on, and in which order the processes get their ranks: of what they have told."""

import errno
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from mingpt.errors import TransientError, UserError
from mingpt.snapshot.elsewhere import Marker
from mingpt.tiers.home import Held, Home, HomeSearch, Sighting, Trouble, choose
from tests.kits.config_kit import configured

X, Y = "a" * 32, "b" * 32  # runs


@dataclass(frozen=True)
class Node:
    """disk, snapshots: nodes with the same one share it; "": each has its own. hot: a step in its memory."""

    host: str
    processes: int = 1
    disk: str = ""
    snapshots: str = ""
    head: bool = False
    held: Held | None = None
    marker: Marker | None = None
    hot: int = 0
    why_not: Trouble | None = None
    problem: Trouble | None = None


def lasting(reason: str) -> Trouble:
    return Trouble.of(UserError(reason))


def passing(reason: str) -> Trouble:
    return Trouble.of(TransientError(reason))


def sightings(nodes: Sequence[Node], order: Sequence[int] | None = None) -> list[Sighting]:
    """What their processes tell. order: the node of each process, by rank; without, one node after the other."""
    order = order or [number for number, node in enumerate(nodes) for _ in range(node.processes)]
    first = [order.index(number) for number in range(len(nodes))]  # the process that writes for its node

    def seen(place: str, number: int) -> list[int]:
        mine = getattr(nodes[number], place)
        same = [n for n, node in enumerate(nodes) if n == number or (mine and getattr(node, place) == mine)]
        return sorted(first[n] for n in same if not nodes[n].why_not)

    found = list[Sighting]()
    for rank, number in enumerate(order):
        node = nodes[number]
        one = Sighting(
            node.host, str(number), node.head, False, node.why_not,
            sees_run=seen("disk", number), sees_snapshots=seen("snapshots" if node.snapshots else "disk", number),
        )  # fmt: skip
        if rank == first[number]:
            memory = ("/m/x", node.hot) if node.hot else None
            one = replace(
                one, writes=not node.why_not, held=node.held, marker=node.marker, in_memory=memory, problem=node.problem
            )
        found.append(one)
    return found


def chosen(*nodes: Node, order: Sequence[int] | None = None, anew: bool = False) -> tuple[list[int], Home]:
    ranks, home = choose(sightings(nodes, order), "run.dir=runs/x", anew)
    return ranks, Home(list(home.run), list(home.snapshots), home.host)


HELD = Held(X, 2, 8)
SEEN = Marker(X, "ada", 2, 8)
ADA, BOB, CYD = Node("ada"), Node("bob"), Node("cyd")
WITH_IT = replace(BOB, held=HELD)

CASES: dict[str, tuple[tuple[Node, ...], list[int], Home]] = {
    "all share it": (
        (replace(ADA, disk="nfs"), replace(BOB, disk="nfs", head=True)),
        [0, 1], Home([0, 1], [0, 1]),
    ),
    "nobody has it: rank 0's node": ((replace(ADA, processes=2), BOB), [0, 1, 2], Home([0, 1], [0, 1], "ada")),
    "nobody has it: the platform's first node": (
        (replace(ADA, processes=2), replace(BOB, processes=2, head=True)),
        [2, 3, 0, 1], Home([0, 1], [0, 1], "bob"),
    ),
    "the first one can't write, and nobody has it": (
        (replace(ADA, head=True, why_not=lasting("read-only")), BOB), [1, 0], Home([0], [0], "bob"),
    ),
    "whole nodes are moved": (
        (replace(ADA, processes=2), replace(CYD, processes=2), replace(WITH_IT, processes=2)),
        [4, 5, 0, 1, 2, 3], Home([0, 1], [0, 1], "bob"),
    ),
    "nodes that are unlike": (
        (replace(ADA, processes=3), replace(WITH_IT, processes=1), replace(CYD, processes=2)),
        [3, 0, 1, 2, 4, 5], Home([0], [0], "bob"),
    ),
    "it is not at the platform's first node": (
        (replace(ADA, head=True, marker=replace(SEEN, host="bob")), WITH_IT), [1, 0], Home([0], [0], "bob"),
    ),
    "a run without a snapshot": (
        (replace(ADA, head=True), replace(BOB, held=Held(X, 1, 0))), [1, 0], Home([0], [0], "bob"),
    ),
    "the newest attempt, not the highest step": (
        (replace(ADA, held=Held(X, 2, 12)), replace(BOB, held=Held(X, 3, 4))), [1, 0], Home([0], [0], "bob"),
    ),
    "of one attempt the highest step": (
        (replace(ADA, held=Held(X, 2, 4)), replace(BOB, held=Held(X, 2, 8))), [1, 0], Home([0], [0], "bob"),
    ),
    "equal copies: the platform's first node": (
        (replace(ADA, held=HELD), replace(BOB, held=HELD, head=True)), [1, 0], Home([0], [0], "bob"),
    ),
    "equal copies: rank 0's node": (
        (replace(ADA, held=HELD), replace(BOB, held=HELD)), [0, 1], Home([0], [0], "ada"),
    ),
    "copies of an early version, which had no id": (
        (replace(ADA, held=Held(None, 1, 4)), replace(BOB, held=Held(None, 2, 8))), [1, 0], Home([0], [0], "bob"),
    ),
    "a copy has been brought from the machine that is missing": (
        (replace(ADA, marker=replace(SEEN, host="cyd")), replace(BOB, held=HELD, marker=replace(SEEN, host="cyd"))),
        [1, 0], Home([0], [0], "bob"),
    ),
    "two of three share it": (
        (CYD, replace(BOB, disk="nfs", held=HELD), replace(ADA, disk="nfs", held=HELD)),
        [1, 2, 0], Home([0, 1], [0, 1], "bob"),
    ),
    "snapshots that all see, at the start": (
        (replace(ADA, snapshots="nfs"), replace(BOB, snapshots="nfs", head=True)),
        [1, 0], Home([0], [0, 1], "bob"),
    ),
    "snapshots that all see": (
        (replace(ADA, snapshots="nfs", held=Held(None, 0, 8)), replace(BOB, snapshots="nfs", held=HELD)),
        [1, 0], Home([0], [0, 1], "bob"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_where_it_lives(name: str) -> None:
    nodes, ranks, home = CASES[name]
    assert chosen(*nodes) == (ranks, home)


def test_ranks_that_alternate_between_nodes() -> None:
    """As Slurm's cyclic distribution gives them: nodes are put together, local order kept."""
    nodes = replace(ADA, processes=3), replace(WITH_IT, processes=2), replace(CYD, processes=2)
    order = [0, 1, 2, 0, 1, 2, 0]
    assert chosen(*nodes, order=order) == ([1, 4, 0, 3, 6, 2, 5], Home([0, 1], [0, 1], "bob"))


# What is wrong, and words that the message must have.
LOST = {
    "the machine with it is missing": (
        (replace(BOB, marker=SEEN), CYD), ["runs/x", "ada", "step 8", "run.name", "resume.anew=true"],
    ),
    "alone": ((replace(BOB, marker=SEEN),), ["ada", "step 8"]),
    "the newest marker counts": (
        (replace(BOB, marker=SEEN), replace(CYD, marker=Marker(X, "dan", 3, 4))), ["dan", "step 4"],
    ),
    "another one keeps it in memory": ((replace(BOB, marker=SEEN, hot=9), CYD), ["ada", "bob", "step 9", "/m/x"]),
    "an older copy is here": (
        (replace(BOB, held=Held(X, 1, 12)), replace(CYD, marker=SEEN)), ["ada", "step 8"],
    ),
    "an older copy beside the marker": ((replace(BOB, held=Held(X, 1, 12), marker=SEEN), CYD), ["ada", "step 8"]),
    "another run is here": ((replace(BOB, held=Held(Y, 5, 12)), replace(CYD, marker=SEEN)), ["ada", "step 8"]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_the_machine_with_it_is_missing(name: str) -> None:
    nodes, words = LOST[name]
    with pytest.raises(UserError) as caught:
        chosen(*nodes)
    assert [word for word in words if word not in str(caught.value)] == [], caught.value
    assert caught.value.everywhere
    order, home = chosen(*nodes, anew=True)
    keeps = next((rank for rank, node in enumerate(nodes) if node.held), 0)
    assert order[0] == keeps
    assert home.host == (nodes[keeps].host if len(nodes) > 1 else "")


@pytest.mark.parametrize("anew", [False, True])
def test_two_runs_under_one_name(anew: bool) -> None:
    for other in (Held(Y, 2, 8), Held(Y, 1, 0), Held(None, 1, 4), Held(None, 0, 4)):
        for nodes in ((WITH_IT, replace(CYD, held=other)), (replace(CYD, held=other), ADA, WITH_IT)):
            with pytest.raises(UserError, match=r"run\.dir=runs/x: .*(bob.*cyd|cyd.*bob).*run\.name"):
                chosen(*nodes, anew=anew)


def test_a_folder_that_cannot_be_used() -> None:
    with pytest.raises(UserError, match="read-only"):
        chosen(replace(ADA, why_not=lasting("read-only")), replace(BOB, why_not=lasting("read-only")))
    with pytest.raises(UserError, match="is a FIFO"):
        chosen(ADA, replace(BOB, problem=lasting("is a FIFO")))
    with pytest.raises(UserError, match=r"snapshot\.dir"):
        chosen(replace(ADA, disk="nfs", snapshots="a"), replace(BOB, disk="nfs", snapshots="b"))


def test_the_disk_with_the_run_cannot_be_written() -> None:
    """Its machine is here: no second run may begin on another one, and no message says that it is missing."""
    full = replace(WITH_IT, why_not=lasting("no space left"))
    for ada in (ADA, replace(ADA, marker=replace(SEEN, host="bob"))):
        with pytest.raises(UserError, match="no space left"):
            chosen(ada, full)


@pytest.mark.parametrize("bob", [ADA, CYD])
def test_the_folder_is_missing_and_nobody_knows_about_the_machine(bob: Node) -> None:
    """It may be here with a new, empty disk, also under a new name; or somebody has deleted the folder."""
    with pytest.raises(UserError, match=r"is on ada's disk .*, and none of these nodes has its folder:"):
        chosen(bob, replace(BOB, marker=SEEN))


def test_what_may_pass_is_tried_again() -> None:
    """A disk that fails ends the start with 70; but with 64 if another node has what the user must cure."""
    for bad in (replace(BOB, problem=passing("EIO")), replace(WITH_IT, why_not=passing("EIO"))):
        with pytest.raises(TransientError, match=r"^EIO$"):
            chosen(ADA, bad)
        with pytest.raises(UserError, match=r"^is a FIFO$"):
            chosen(bad, replace(ADA, problem=lasting("is a FIFO")))
    with pytest.raises(UserError, match=r"^read-only$"):
        chosen(replace(ADA, why_not=passing("EIO")), replace(BOB, why_not=lasting("read-only")))


# --- on a disk: this process is rank 0 of two nodes ---


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HomeSearch:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("GROUP_RANK", "0")
    there = f"{tmp_path}/a"
    return HomeSearch(configured(f"run.dir={there}/runs/x", f"snapshot.dir={there}/snapshots/x"))


def probes(disk: Path) -> list[str]:
    return sorted(str(path.relative_to(disk)) for path in disk.rglob(".probe-*"))


class Other:
    """The other node, whose disk is its own. seen: what it tells; files: what is on this disk when all have told."""

    def __init__(self, disk: Path, seen: Sighting) -> None:
        self.disk, self.seen = disk, seen
        self.files: list[str] = []
        self.probes: list[str | None] = []
        self.left: list[Any] = []  # probes, and whether there is the folder, before that may go

    def __call__(self, value: Any) -> list[Any]:
        if not self.probes:
            self.probes = [value, ".probe-of-bob"]
            return self.probes
        if value is None:
            self.left = [probes(self.disk), (self.disk / "a/runs/x").is_dir()]
            return [None, None]
        self.files = probes(self.disk)
        return [value, asdict(self.seen)]


GONE = Sighting("bob", "1", False, True, sees_run=[1], sees_snapshots=[1], marker=SEEN)


def test_a_start_that_is_refused_leaves_what_was_there(search: HomeSearch, tmp_path: Path) -> None:
    bob = Other(tmp_path, GONE)
    with pytest.raises(UserError, match="ada's disk"):
        search.settle(bob)
    [probe, _] = bob.probes
    assert bob.files == [f"a/runs/x/{probe}", f"a/snapshots/x/{probe}"]
    assert bob.left == [[], True]
    assert [*tmp_path.iterdir()] == []

    (tmp_path / "a/runs").mkdir(parents=True)
    (tmp_path / "a/snapshots/y").mkdir(parents=True)
    with pytest.raises(UserError, match="ada's disk"):
        search.settle(Other(tmp_path, GONE))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "a", "a/runs", "a/snapshots", "a/snapshots/y",
    ]  # fmt: skip


def test_a_start_without_the_others_leaves_nothing(search: HomeSearch, tmp_path: Path) -> None:
    def nobody(value: Any) -> list[Any]:
        raise TimeoutError("nobody has come")

    with pytest.raises(TimeoutError):
        search.settle(nobody)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_at_a_start_is_tried_again(
    search: HomeSearch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    SEEN.write(search.config.run.dir)
    bad, real = (tmp_path / "a/runs/x/elsewhere.json").stat().st_ino, os.fdopen

    def failing(descriptor: int, mode: str = "r") -> Any:
        if os.fstat(descriptor).st_ino == bad:
            raise OSError(number, os.strerror(number))
        return real(descriptor, mode)

    monkeypatch.setattr(os, "fdopen", failing)
    monkeypatch.setattr("mingpt.files.localfile.PAUSES", (0.0, 0.0))
    with pytest.raises(TransientError, match=os.strerror(number)):
        search.settle(Other(tmp_path, replace(GONE, marker=None)))


class Apart:
    """Two nodes, each in a thread. What they gather is paired turn by turn, as over a store."""

    def __init__(self) -> None:
        self.turn = Barrier(2, timeout=20)
        self.values: list[Any] = [None, None]

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.turn.wait()
        values = [*self.values]
        self.turn.wait()  # before the next turn's values come
        return values

    def settle(self, rank: int, search: HomeSearch) -> str:
        """How it ends on this node."""
        try:
            search.settle(partial(self.gather, rank))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "settled"


@pytest.mark.parametrize("there", ["", "memory://x/run"], ids=["a disk", "a bucket"])
def test_a_store_that_one_node_has_no_package_for(there: str, search: HomeSearch, tmp_path: Path) -> None:
    """The others hear why in the same turn, and all end with that cause and its exit code."""
    two = Apart()
    searches = [HomeSearch(configured(f"run.dir={there}")) if there else search]
    searches.append(HomeSearch(configured("run.dir=nowhere://x/run")))
    with ThreadPoolExecutor(2) as pool:
        ends = [*pool.map(two.settle, range(2), searches)]
    assert ends[0] == ends[1]
    assert ends[0].startswith("UserError: run.dir=nowhere://x/run: ")
    assert not two.turn.broken
    assert [*tmp_path.iterdir()] == []
