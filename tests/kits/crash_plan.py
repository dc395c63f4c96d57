"""Which crash comes next: those at boundaries of a snapshot's writes, and in between anything else."""

import random
from collections import Counter
from collections.abc import Iterable

# What each kills: a training process; all of a node; the same, with what the node has in memory; the launcher alone.
# At a random moment. A stop kills nothing.
ANYWHERE = ("worker", "node", "machine", "agent", "stop")
# The storage server, at a random moment; nothing, but the whole run is started twice at once.
SERVER, DOUBLE = "server", "double start"
SHARE_OF_BOUNDARIES = 0.55
# Boundaries are what crash_site/sitecustomize.py reads: when, what, tier, and who dies then.
WRITERS = {"disk": ("hot process", "durable process"), "bucket": ("hot process", "durable process", "durable server")}
# The same crashes each time: in few starts, what a random campaign meets in many.
STORY = [
    ("disk", "agent"),
    ("disk", "worker"),
    ("bucket", "before manifest durable server"),
    ("bucket", "after manifest durable process"),
]


class Plan:
    """Crashes that are wanted, each with the storage of its run, and those that have happened."""

    def __init__(self, kills: int, chooser: random.Random, parts: Iterable[str]) -> None:
        """kills: 0 for the story. With 128 and more, every boundary is visited."""
        self.happened = Counter[str]()
        places = [
            (storage, f"{when} {what} {writer}")
            for storage, writers in WRITERS.items()
            for writer in writers
            for what in (*sorted(parts), "manifest")
            for when in ("before", "after")
        ]
        others = [(storage, kind) for storage in WRITERS for kind in ANYWHERE] + [
            ("bucket", SERVER),
            ("bucket", DOUBLE),
        ]
        visited = chooser.sample(places, min(len(places), int(kills * SHARE_OF_BOUNDARIES)))
        self.left = visited + chooser.choices(others, k=kills - len(visited))
        chooser.shuffle(self.left)
        self.left = self.left or [*STORY]

    def upcoming(self, storage: str) -> list[str]:
        return [crash for place, crash in self.left if place == storage]

    def count(self, storage: str, crash: str) -> None:
        self.happened[f"{crash}, {storage}"] += 1
        if crash in self.upcoming(storage):
            self.left.remove((storage, crash))
