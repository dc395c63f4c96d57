"""Which crash comes next: the boundaries of writes that nobody has visited yet, and in between anything else."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import cycle

STORAGES = ("disk", "bucket")
# What each kills: a training process; all of a node; the same, with what the node has in memory; the launcher alone;
# the storage server. At a random moment; the last one before a start that finds no server. A stop kills nothing.
ANYWHERE = ("worker", "node", "machine", "agent", "stop")
SERVER, SERVER_BEFORE = "server", "server before a start"
# Of a whole start: a write that takes longer than the processes wait for each other; the run is started twice at once;
# before it, somebody goes back to an older step.
SLOW, DOUBLE, ROLLBACK = "slow write", "double start", "rollback"
SHARE_OF_BOUNDARIES = 0.55


@dataclass(frozen=True, order=True)
class Boundary:
    """A moment in the writing of a snapshot, and who dies then."""

    tier: str  # hot, durable on disk, durable in a bucket
    what: str  # model-00001, …, manifest
    when: str  # before, after
    victim: str = "process"  # that writes; or server

    @property
    def kind(self) -> str:
        return f"boundary, {self.victim}"

    @property
    def order(self) -> str:
        """As sitecustomize reads it."""
        return f"{self.when} {self.what} {self.tier.split()[0]} {self.victim}"

    def is_in(self, storage: str) -> bool:
        return self.tier == "hot" or self.tier.endswith(storage)


def boundaries(parts: Iterable[str]) -> list[Boundary]:
    """All of them, for the parts that a snapshot has."""
    on_disk, in_bucket = "durable on disk", "durable in a bucket"
    places = (("hot", "process"), (on_disk, "process"), (in_bucket, "process"), (in_bucket, "server"))
    return [
        Boundary(tier, what, when, victim)
        for tier, victim in places
        for what in (*sorted(parts), "manifest")
        for when in ("before", "after")
    ]


@dataclass
class Plan:
    """Draws crashes and counts those that have happened. must: the boundaries without which it is not done."""

    kills: int
    chooser: random.Random
    visits: "Counter[Boundary]"
    must: set[Boundary]
    kinds: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, kills: int, chooser: random.Random, parts: Iterable[str]) -> "Plan":
        """A long one visits every boundary, a short one at least one where a process and one where the server dies."""
        every = boundaries(parts)
        must = {chooser.choice([b for b in every if b.victim == victim]) for victim in ("process", "server")}
        if kills >= 3 * len(every):
            must = set(every)
        return cls(kills, chooser, Counter(dict.fromkeys(every, 0)), must)

    def count(self, crash: "Boundary | str") -> None:
        if isinstance(crash, Boundary):
            self.visits[crash] += 1
        self.kinds[crash if isinstance(crash, str) else crash.kind] += 1

    @property
    def unvisited(self) -> list[Boundary]:
        return sorted(boundary for boundary, count in self.visits.items() if not count)

    @property
    def left(self) -> int:
        """How many more crashes are wanted."""
        return max(self.kills - self.kinds.total(), len(self._missing))

    def crashes(self, storage: str) -> int:
        """How many of these may happen to a run there."""
        return self.left

    def world(self) -> tuple[tuple[int, ...], list[int]]:
        """Of the next start: the nodes, and how many processes each has."""
        nodes: tuple[int, ...] = self.chooser.choice(((0,), (0,), (1,), (0, 1)))
        return nodes, [self.chooser.choice((1, 1, 1, 2, 2, 3, 4) if len(nodes) == 1 else (1, 1, 2)) for _ in nodes]

    @property
    def _missing(self) -> list[Boundary]:
        return [b for b in self.unvisited if b in self.must]

    @property
    def _hurry(self) -> bool:
        """Whether what is missing goes before all else."""
        return self.left <= 2 * len(self._missing)

    def storage(self) -> str:
        """For the next run."""
        useful = [s for s in STORAGES if any(b.is_in(s) for b in self._missing)]
        return self.chooser.choice(useful if self._hurry and useful else STORAGES)

    def draw(self, storage: str) -> "Boundary | str":
        """The next crash of a run whose snapshots are there."""
        missing = [b for b in self._missing if b.is_in(storage)]
        if self.chooser.random() < SHARE_OF_BOUNDARIES or (missing and self._hurry):
            new = [b for b in self.unvisited if b.is_in(storage)]
            return self.chooser.choice(missing or new or sorted(b for b in self.visits if b.is_in(storage)))
        return self.chooser.choice((*ANYWHERE, SERVER) if storage == "bucket" else ANYWHERE)


@dataclass
class Story(Plan):
    """The same crashes each time: in a few starts, what a random campaign meets in many."""

    script: list[tuple[str, "Boundary | str"]] = field(
        default_factory=lambda: [
            ("disk", "agent"),
            ("disk", "worker"),
            ("bucket", Boundary("durable in a bucket", "manifest", "before", "server")),
            ("bucket", Boundary("durable in a bucket", "manifest", "after")),
        ]
    )
    sizes: Iterator[int] = field(default_factory=lambda: cycle((1, 2)))

    def count(self, crash: "Boundary | str") -> None:
        super().count(crash)
        if self.script and self.script[0][1] == crash:
            self.script.pop(0)

    @property
    def left(self) -> int:
        return len(self.script)

    def crashes(self, storage: str) -> int:
        return sum(place == storage for place, _ in self.script)

    def world(self) -> tuple[tuple[int, ...], list[int]]:
        return (0,), [next(self.sizes)]

    def storage(self) -> str:
        return self.script[0][0]

    def draw(self, storage: str) -> "Boundary | str":
        return self.script[0][1]
