"""What was ever seen of a run under crashes, and what must therefore hold after each of its starts."""

import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mingpt.cli import cli
from mingpt.snapshot.reader import read
from mingpt.snapshot.retention import Retention, steps_to_delete
from mingpt.snapshot.store import Store
from tests.kits.run_kit import Run


class Witness:
    """undisturbed: the digest of each step of a run that nobody disturbed. memories: a folder for each node."""

    def __init__(
        self, run: Run, undisturbed: Mapping[int, str], retention: Retention, memories: Sequence[Path]
    ) -> None:
        self.run, self.undisturbed, self.retention, self.memories = run, undisturbed, retention, memories
        self.seen: set[int] = set()  # committed durable steps
        self.start_from: Collection[int] = {0}  # the next attempt must; empty: a crash may have changed it
        self.attempts = 0
        self.rewound_to: int | None = None  # where somebody went back to, until an attempt has started from there
        self.doubled = False  # two runs at once: one may commit while the other one looks for where to start
        self._used: Collection[int] = ()  # nodes of this start

    def read_line(self, line: str) -> None:
        """Of a launcher's output, in any thread."""
        assert not line.startswith("DAMAGED SNAPSHOT"), line  # a kill leaves something whole or nothing
        if match := re.match(r"step (\d+): snapshot ([0-9a-f]{16}) in ", line):
            self.seen.add(int(match[1]))
            assert self.undisturbed[int(match[1])].startswith(match[2]), f"another digest: {line}"
        elif match := re.match(r"attempt \d+: steps (\d+) to ", line):
            self.attempts += 1
            self._started_from(int(match[1]) - 1, line)
        elif match := re.match(r"nothing to do: the run has reached step (\d+)", line):
            self._started_from(int(match[1]), line)

    def _started_from(self, step: int, line: str) -> None:
        assert not self.start_from or step in self.start_from, f"must start from step {self.start_from}: {line}"
        committed = max(self.seen, default=0)
        assert step >= committed or self.doubled, f"step {committed} was committed: {line}"
        self.start_from = ()
        if self.rewound_to is not None:  # what these nodes had in memory is gone; others know nothing of it yet
            self.rewound_to = None
            for node, memory in enumerate(self.memories):
                if node not in self._used:
                    wipe(memory)

    def _verified(self, store: Store) -> set[int]:
        """The committed steps, every byte of which has been read. Raises Damaged."""
        found = {step: read(store, step).manifest.digest for step in store.steps()}
        assert found.items() <= self.undisturbed.items(), f"another digest in {store.url}: {found}"
        return {*found}

    def examine(self) -> None:
        """After a start, when none of its processes lives."""
        newest, present = max(self.seen, default=0), self._verified(self.run.store)
        self.seen |= present
        self.doubled = False
        retained = self.seen - set(steps_to_delete(self.retention, dict.fromkeys(self.seen)))
        assert max(present, default=0) >= newest, f"the newest goes back: {newest}, {present}"
        assert retained <= present, f"lost: {sorted(retained - present)} of {sorted(self.seen)}"
        files = [file for step in self.run.store.folders() for file in self.run.store.files(step)]
        assert not [file.path for file in files if file.was_damaged]

    def expect_start(self, nodes: Collection[int]) -> None:
        """Note, before a start on these nodes, the newest step that one of them can see; all of them are verified."""
        self._used, durable, newest = nodes, set(self.run.store.steps()), set[int]()
        for node in nodes:
            folders = list(self.memories[node].glob("mingpt-*/*"))
            assert len(folders) < 2, f"the run has lost its name: {folders}"
            hot = [step for folder in folders for step in self._verified(Store(str(folder)))]
            newest.add(max([*durable, *hot], default=0))
        if self.rewound_to is not None:
            self.start_from = {self.rewound_to}
        else:  # two runs at once see the memory of their own node only
            self.start_from = newest if self.doubled else {max(newest)}

    def rewind(self, step: int) -> None:
        """Go back to a committed step, on a machine that has the first node's memory, or none of them."""
        memory = self.memories[0] if step % 2 else self.memories[0].with_name("elsewhere")
        code = cli.run("snapshots", ["rewind", self.run.dir, "--step", str(step), "--hot-dir", str(memory)])
        self.seen = self._verified(self.run.store)
        assert (code, max(self.seen)) == (0, step)
        self.rewound_to = step

    def at_the_end(self, nodes: Collection[int]) -> None:
        """When the run has finished on these nodes; what others have in memory nobody could remove."""
        assert max(self._verified(self.run.store)) == max(self.undisturbed), "ended too early"
        assert not [path for node in nodes for path in self.memories[node].glob("mingpt-*/*")]
        for memory in self.memories:
            wipe(memory)


def wipe(memory: Path) -> None:
    """As a machine that is switched off does."""
    shutil.rmtree(memory, ignore_errors=True)
    memory.mkdir()
