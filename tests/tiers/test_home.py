"""Which node a run lives on, and in which order the processes get their ranks: of what they have told."""

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest.mock import Mock

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

READ_ONLY = replace(ADA, why_not=Trouble("read-only", may_pass=False))

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
    "whole nodes are moved, unlike ones": (
        (replace(ADA, processes=3), WITH_IT, replace(CYD, processes=2)),
        [3, 0, 1, 2, 4, 5], Home([0], [0], "bob"),
    ),
    "equal copies: rank 0's node": (
        (replace(ADA, held=HELD), replace(BOB, held=HELD)), [0, 1], Home([0], [0], "ada"),
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


# Of two nodes.
ON_THE_SECOND = {
    "the first one can't write, and nobody has it": (replace(READ_ONLY, head=True), BOB),
    "it is not at the platform's first node": (replace(ADA, head=True, marker=replace(SEEN, host="bob")), WITH_IT),
    "a run without a snapshot": (replace(ADA, head=True), replace(BOB, held=Held(X, 1, 0))),
    "the newest attempt, not the highest step": (replace(ADA, held=Held(X, 2, 12)), replace(BOB, held=Held(X, 3, 4))),
    "of one attempt the highest step": (replace(ADA, held=Held(X, 2, 4)), WITH_IT),
    "equal copies: the platform's first node": (replace(ADA, held=HELD), replace(WITH_IT, head=True)),
    "copies of an early version, which had no id": (
        replace(ADA, held=Held(None, 1, 4)),
        replace(BOB, held=Held(None, 2, 8)),
    ),
    "a copy has been brought from the machine that is missing": (
        replace(ADA, marker=replace(SEEN, host="cyd")),
        replace(WITH_IT, marker=replace(SEEN, host="cyd")),
    ),
}


@pytest.mark.parametrize("name", ON_THE_SECOND)
def test_it_lives_on_the_second_node(name: str) -> None:
    assert chosen(*ON_THE_SECOND[name]) == ([1, 0], Home([0], [0], "bob"))


def test_ranks_that_alternate_between_nodes() -> None:
    """As Slurm's cyclic distribution gives them: nodes are put together, local order kept."""
    ranks, home = chosen(ADA, WITH_IT, CYD, order=[0, 1, 2, 0, 1, 2, 0])
    assert (ranks, home) == ([1, 4, 0, 3, 6, 2, 5], Home([0, 1], [0, 1], "bob"))


# What is wrong, and words that the message must have.
LOST = {
    "the machine with it is missing": (
        (replace(BOB, marker=SEEN), CYD), ["runs/x", "ada", "step 8", "run.name", "resume.anew=true"],
    ),
    "it may be here, with a new and empty disk": (
        (ADA, replace(BOB, marker=SEEN)), ["ada's disk", "none of these nodes has its folder"],
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


FULL = replace(WITH_IT, why_not=Trouble("no space left", may_pass=False))
FIFO = replace(ADA, problem=Trouble("is a FIFO", may_pass=False))
FAILING = [replace(BOB, problem=Trouble("EIO", may_pass=True)), replace(WITH_IT, why_not=Trouble("EIO", may_pass=True))]
# Nodes, what the start raises on all of them, and why.
UNUSABLE: list[tuple[tuple[Node, ...], type[Exception], str]] = [
    ((READ_ONLY, READ_ONLY), UserError, "^read-only$"),
    ((BOB, FIFO), UserError, "^is a FIFO$"),
    ((replace(ADA, disk="x", snapshots="a"), replace(BOB, disk="x", snapshots="b")), UserError, r"snapshot\.dir"),
    # The disk with the run is full. Its machine is here: no second run may begin, and no message says that it is lost.
    ((ADA, FULL), UserError, "^no space left$"),
    ((replace(ADA, marker=replace(SEEN, host="bob")), FULL), UserError, "^no space left$"),
    # What may pass is tried again, unless another node has what the user must cure.
    *(((ADA, bad), TransientError, "^EIO$") for bad in FAILING),
    *(((bad, FIFO), UserError, "^is a FIFO$") for bad in FAILING),
    ((replace(FAILING[1], held=None), READ_ONLY), UserError, "^read-only$"),
]


@pytest.mark.parametrize(("nodes", "kind", "why"), UNUSABLE)
def test_a_place_that_cannot_be_used(nodes: tuple[Node, ...], kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=why):
        chosen(*nodes)


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


def test_a_start_that_is_refused_or_without_the_others_leaves_what_was_there(
    search: HomeSearch, tmp_path: Path
) -> None:
    with pytest.raises(TimeoutError):
        search.settle(Mock(side_effect=TimeoutError))
    assert [*tmp_path.iterdir()] == []

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


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_at_a_start_is_tried_again(
    search: HomeSearch, tmp_path: Path, failing: Callable[..., None], number: int
) -> None:
    SEEN.write(search.config.run.dir)
    failing(tmp_path / "a/runs/x/elsewhere.json", number)
    with pytest.raises(TransientError, match=os.strerror(number)):
        search.settle(Other(tmp_path, replace(GONE, marker=None)))


@pytest.mark.parametrize("there", ["", "memory://x/run"], ids=["a disk", "a bucket"])
def test_a_store_that_one_node_has_no_package_for(there: str, search: HomeSearch, tmp_path: Path) -> None:
    """The others hear why in the same turn, and all end with that cause and its exit code."""
    turn, told = Barrier(2, timeout=20), [None, None]

    def gather(rank: int, value: Any) -> list[Any]:
        """What two nodes gather, each in a thread, is paired turn by turn, as over a store."""
        told[rank] = value
        turn.wait()
        values = [*told]
        turn.wait()  # before the next turn's values come
        return values

    def settle(rank: int, search: HomeSearch) -> str:
        with pytest.raises(UserError) as error:
            search.settle(partial(gather, rank))
        return str(error.value)

    searches = [HomeSearch(configured(f"run.dir={there}")) if there else search]
    searches.append(HomeSearch(configured("run.dir=nowhere://x/run")))
    with ThreadPoolExecutor(2) as pool:
        [end] = {*pool.map(settle, range(2), searches)}
    assert end.startswith("run.dir=nowhere://x/run: ")
    assert not turn.broken
    assert [*tmp_path.iterdir()] == []
