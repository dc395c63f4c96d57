"""What was ever seen of a run under crashes, and what must therefore hold after each of its starts."""

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from mingpt.commands import snapshots
from mingpt.snapshot.reader import read
from mingpt.snapshot.retention import Retention, steps_to_delete
from mingpt.snapshot.store import Store
from run_kit import Run


class Violation(AssertionError):
    pass


def _verified(store: Store) -> dict[int, str]:
    """The digest of each committed step, every byte of which has been read. Raises Damaged."""
    return {step: read(store, step).manifest.digest for step in store.steps()}


class Witness:
    """of: the digest of each step of a run that nobody disturbed. memories: a folder for each node."""

    def __init__(self, run: Run, of: Mapping[int, str], retention: Retention, memories: Sequence[Path]) -> None:
        self.run, self.undisturbed, self.retention, self.memories = run, of, retention, memories
        self.seen: dict[int, str] = {}  # committed durable steps, with the first digits of their digests
        self.start_from: int | None = 0  # where the next attempt must start; None: a crash may have changed that
        self.problems: list[str] = []
        self.attempts = 0
        self.rewound_to: int | None = None  # where somebody went back to, until an attempt has started from there
        self.doubled = False  # two runs at once: one may commit while the other one looks for where to start
        self._used: set[int] = set()  # nodes of this start

    def read_line(self, line: str) -> None:
        """Of a launcher's output, in any thread."""
        if match := re.match(r"step (\d+): snapshot ([0-9a-f]{16}) in ", line):
            self.seen[int(match[1])] = match[2]
            self._require(self.undisturbed[int(match[1])].startswith(match[2]), f"another digest: {line}")
        elif match := re.match(r"attempt \d+: steps (\d+) to ", line):
            self.attempts += 1
            self._started_from(int(match[1]) - 1, line)
        elif match := re.match(r"nothing to do: the run has reached step (\d+)", line):
            self._started_from(int(match[1]), line)
        elif line.startswith("DAMAGED SNAPSHOT"):  # a kill leaves something whole or nothing
            self.problems.append(line)

    def _started_from(self, step: int, line: str) -> None:
        if self.start_from is not None:
            self._require(step == self.start_from, f"must start from step {self.start_from}: {line}")
        committed = max(self.seen, default=0)
        self._require(step >= committed or self.doubled, f"step {committed} was committed: {line}")
        self.start_from = None
        if self.rewound_to is not None:  # what these nodes had in memory is gone; others know nothing of it yet
            self.rewound_to = None
            for node, memory in enumerate(self.memories):
                if node not in self._used:
                    wipe(memory)

    def _require(self, condition: bool, what: str) -> None:
        if not condition:
            self.problems.append(what)

    def examine(self) -> None:
        """After a start, when none of its processes lives: raises Violation or Damaged."""
        before = dict(self.seen)
        present = _verified(self.run.store)
        self.seen |= present
        retained = self.seen.keys() - steps_to_delete(self.retention, dict.fromkeys(self.seen))
        self._require(bool(present) or not before, "no good snapshot is left")
        self._require(max(present, default=0) >= max(before, default=0), f"the newest goes back: {before}, {present}")
        self.doubled = False
        self._require(retained <= present.keys(), f"lost: {sorted(retained - present.keys())} of {sorted(self.seen)}")
        self._check_digests(present)
        aside = [f.path for s in self.run.store.folders() for f in self.run.store.files(s) if f.was_damaged]
        self._require(not aside, f"set aside: {aside}")
        if self.problems:
            raise Violation(f"{self.run.dir}:\n" + "\n".join(self.problems))

    def expect_start(self, nodes: Sequence[int]) -> None:
        """Note, before a start on these nodes, the newest step that one of them can see."""
        self._used = set(nodes)
        steps = [*self.run.store.steps(), *(s for node in nodes for s in self._hot_steps(node))]
        self.start_from = max(steps, default=0) if self.rewound_to is None else self.rewound_to

    def rewind(self, step: int) -> None:
        """Go back to a committed step, on a machine that has the first node's memory, or none of them."""
        memory = self.memories[0] if step % 2 else self.memories[0].with_name("elsewhere")
        code = snapshots.main(["rewind", self.run.dir, "--step", str(step), "--hot-dir", str(memory)])
        self.seen = {s: d for s, d in _verified(self.run.store).items() if s <= step}
        self._require(code == 0 and max(self.run.store.steps()) == step, f"exit code {code} of a rewind to step {step}")
        self.rewound_to = step

    def _hot_steps(self, node: int) -> list[int]:
        """All verified: what a kill left in memory is good, too."""
        folders = list(self.memories[node].glob("mingpt-*/*"))
        if len(folders) > 1:
            raise Violation(f"the run has lost its name: {folders}")
        hot = _verified(Store(str(folders[0]))) if folders else {}
        self._check_digests(hot)
        return sorted(hot)

    def _check_digests(self, steps: Mapping[int, str]) -> None:
        for step, digest in steps.items():
            self._require(
                digest == self.undisturbed[step], f"step {step}: digest {digest}, not {self.undisturbed[step]}"
            )

    def at_the_end(self, nodes: Sequence[int]) -> None:
        """When the run has finished on these nodes; what others have in memory nobody could remove."""
        last = max(self.undisturbed)
        self._require(self.run.digest() == self.undisturbed[last], f"ended with the digest {self.run.digest()}")
        left = [path for node in nodes for path in self.memories[node].glob("mingpt-*/*")]
        self._require(not left, f"left in memory: {left}")
        if self.problems:
            raise Violation(f"{self.run.dir}:\n" + "\n".join(self.problems))
        for memory in self.memories:
            wipe(memory)


def wipe(memory: Path) -> None:
    """As a machine that is switched off does."""
    shutil.rmtree(memory, ignore_errors=True)
    memory.mkdir()
