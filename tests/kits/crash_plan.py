"""Which crash comes next: the boundaries of writes that nobody has visited yet, and in between anything else."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import cycle

STORAGES = ("disk", "bucket")
# What each kills: a training process; all of a node; the same, with what the node has in memory; the launcher alone;
# the storage server. At a random moment. A stop kills nothing.
ANYWHERE = ("worker", "node", "machine", "agent", "stop")
SERVER = "server"
# Of a whole start: the run is started twice at once; before it, somebody goes back to an older step.
DOUBLE, ROLLBACK = "double start", "rollback"
SHARE_OF_BOUNDARIES = 0.55


@dataclass(frozen=True, order=True)
class Boundary:
    """A moment in the writing of a snapshot, and who dies then."""

    tier: str  # hot, durable on disk, durable in a bucket
    what: str  # model-00001, …, manifest
    when: str  # before, after
    victim: str = "process"  # that writes; or server

    @property
    def order(self) -> str:
        """As sitecustomize reads it."""
        return f"{self.when} {self.what} {self.tier.split()[0]} {self.victim}"

    def is_in(self, storage: str) -> bool:
        return self.tier == "hot" or self.tier.endswith(storage)


def boundaries(parts: Iterable[str]) -> list[Boundary]:
    """All of them, for the parts that a snapshot has."""
    tiers = ("hot", "durable on disk", "durable in a bucket")
    places = [(tier, "process") for tier in tiers] + [(tiers[2], "server")]
    what = [*sorted(parts), "manifest"]
    return [Boundary(t, name, when, victim) for t, victim in places for name in what for when in ("before", "after")]


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
        return cls(kills, chooser, Counter(dict.fromkeys(every, 0)), set(every) if kills >= 3 * len(every) else must)

    def count(self, crash: "Boundary | str") -> None:
        if isinstance(crash, Boundary):
            self.visits[crash] += 1
            crash = f"boundary, {crash.victim}"
        self.kinds[crash] += 1

    def unvisited(self, storage: str = "") -> list[Boundary]:
        return sorted(b for b, count in self.visits.items() if not count and b.is_in(storage))

    @property
    def left(self) -> int:
        """How many more crashes are wanted."""
        return max(self.kills - self.kinds.total(), len(self.must.intersection(self.unvisited())))

    def crashes(self, storage: str) -> int:
        """How many of these the next start there may see."""
        return min(self.chooser.choice((2, 4, 6)), self.left)

    def world(self) -> tuple[tuple[int, ...], list[int]]:
        """Of the next start: the nodes, and how many processes each has."""
        nodes: tuple[int, ...] = self.chooser.choice(((0,), (0,), (1,), (0, 1)))
        return nodes, [self.chooser.choice((1, 1, 1, 2, 2, 3, 4) if len(nodes) == 1 else (1, 1, 2)) for _ in nodes]

    def storage(self) -> str:
        """For the next run: where something is missing, if that goes before all else."""
        useful = [storage for storage in STORAGES if self._missing(storage)]
        return self.chooser.choice(useful if self._hurry and useful else STORAGES)

    def draw(self, storage: str) -> "Boundary | str":
        """The next crash of a run whose snapshots are there."""
        missing = self._missing(storage)
        if self.chooser.random() < SHARE_OF_BOUNDARIES or (missing and self._hurry):
            every = sorted(b for b in self.visits if b.is_in(storage))
            return self.chooser.choice(missing or self.unvisited(storage) or every)
        return self.chooser.choice((*ANYWHERE, SERVER) if storage == "bucket" else ANYWHERE)

    def _missing(self, storage: str) -> list[Boundary]:
        return [b for b in self.unvisited(storage) if b in self.must]

    @property
    def _hurry(self) -> bool:
        return self.left <= 2 * len(self.must.intersection(self.unvisited()))


@dataclass
class Story(Plan):
    """The same crashes each time: in three starts, what a random campaign meets in many."""

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
