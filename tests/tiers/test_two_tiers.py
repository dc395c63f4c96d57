"""The two tiers together: which of them is due, which has the newer step, and from which a restart goes on.

Attempts with real writers and stores and a state for each step, without the training.
"""

from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from shutil import rmtree
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
from torch import Tensor

from mingpt.snapshot.attempts import Attempt, RunRecord
from mingpt.snapshot.format import Manifest, Metrics
from mingpt.snapshot.restore import Put, Restored
from mingpt.snapshot.store import Store
from mingpt.tiers.checkpointer import Checkpointer, Content
from mingpt.tiers.tiers import Tiers, newest
from tests.kits.config_kit import configured
from tests.kits.snapshot_kit import ALONE, PROVENANCE, state_of


def content(step: int) -> Content:
    return state_of(step), Metrics(loss=1.0)


class Run:
    def __init__(self, folder: Path, every: int, hot_every: int) -> None:
        self.dir, self.memory = str(folder / "run"), folder / "memory"
        self.memory.mkdir()
        usual = ("data=random", "world.device=cpu", "snapshot.asynchronous=false", "snapshot.keep=99")
        intervals = (f"snapshot.every_steps={every}", f"snapshot.hot_every_steps={hot_every}")
        self.config = configured(*usual, *intervals, f"run.dir={self.dir}", f"snapshot.hot_dir={self.memory}")
        self.said = list[str]()

    def begin(self) -> tuple[Checkpointer, Restored | None]:
        """A new attempt, as assemble.py builds one. The state that it takes over must be that of its step."""
        tiers = Tiers(self.config, ALONE, 100, self.said.append)
        taken = dict[str, Tensor]()

        def take(manifest: Manifest) -> Put:
            taken.clear()
            return lambda kind, tensors: taken.update(tensors)

        loaded = tiers.restore(take)
        step, digest, parent = 0, None, 0
        if loaded:
            step, digest, parent = loaded.manifest.step, loaded.manifest.digest, loaded.manifest.attempt
            assert all(taken[name].equal(t) for part in state_of(step).values() for name, t in part.items())
        claim = Attempt.claim(self.dir, step, digest, parent)
        history = [{"attempt": claim.number, "from_step": step}]
        record = RunRecord(claim.number, claim, PROVENANCE | {"history": history})
        return Checkpointer(self.config, tiers, record, Mock()), loaded

    def train(self, checkpointer: Checkpointer, start: int, last: int) -> list[int]:
        """Go on from `start` to step `last`; returns when a snapshot was due."""
        due = list[int]()
        for step in range(start + 1, last + 1):
            flags = checkpointer.flags(stop=False)
            if checkpointer.is_due(step, flags, best=False):
                due.append(step)
                checkpointer.after_step(step, partial(content, step), flags, best=False)
                if checkpointer.hot_writer:
                    with suppress(TimeoutError):
                        checkpointer.hot_writer.wait_until_idle()
        return due

    def killed_after(self, last: int) -> tuple[int, str, bool, list[int]]:
        """An attempt that is killed after step `last`: from which step and tier it went on, whether that was durable,
        and when a snapshot was due.
        """
        checkpointer, loaded = self.begin()
        start, tier, durable = 0, "", False
        if loaded:
            start, tier = loaded.manifest.step, "memory" if loaded.url.startswith(str(self.memory)) else "disk"
            durable = checkpointer.tiers.is_durable(loaded)
        return start, tier, durable, self.train(checkpointer, start, last)

    def hot_steps(self) -> list[int]:
        return [step for folder in self.memory.glob("mingpt-*/*") for step in Store(str(folder)).steps()]


def multiples(every: int, after: int, last: int) -> set[int]:
    return {step for step in range(after + 1, last + 1) if every and step % every == 0}


INTERVALS = [*product((0, 2, 3, 4), repeat=2)]  # none, equal ones, multiples, and neither


@pytest.mark.parametrize(("every", "hot_every"), INTERVALS)
def test_each_tier_has_its_steps_and_a_restart_goes_on_from_the_newest(
    every: int, hot_every: int, tmp_path: Path
) -> None:
    """Three attempts that are killed, and a fourth one on a new node."""
    run = Run(tmp_path, every, hot_every)
    start, tier, on_disk, in_memory = 0, "", set[int](), 0
    for last in (7, 10, 15):
        durable, hot = multiples(every, start, last), multiples(hot_every, start, last)
        assert run.killed_after(last) == (start, tier, start in on_disk, sorted(durable | hot))
        on_disk |= durable
        in_memory = max(hot, default=in_memory)
        assert Store(f"{run.dir}/snapshots").steps() == sorted(on_disk, reverse=True)
        assert run.hot_steps() == [in_memory] * (in_memory > 0)
        start = max([in_memory, *on_disk])
        tier = "" if not start else "memory" if start == in_memory else "disk"  # of equal ones that which is near
        assert newest(run.config) == start
    rmtree(run.memory)
    run.memory.mkdir()
    assert run.killed_after(15)[:2] == (max(on_disk, default=0), "disk" if on_disk else "")
    assert not [line for line in run.said if "removed" in line or "DAMAGED" in line or "FAILED" in line]


def test_a_write_to_memory_that_never_returns_costs_no_durable_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write, over = Run(tmp_path, 4, 2), Store.write_part, Event()

    def write_part(self: Store, step: int, *part: Any) -> None:
        if self.key == "snapshot.hot_dir":
            over.wait()
        write(self, step, *part)

    monkeypatch.setattr(Store, "write_part", write_part)
    checkpointer, _ = run.begin()
    assert checkpointer.hot_writer
    checkpointer.hot_writer.hang_seconds = 0
    try:
        run.train(checkpointer, 0, 8)
        assert checkpointer.last(9, content(9), stopping=True)
        checkpointer.close()
    finally:
        over.set()
    assert checkpointer.store.steps() == [9, 8, 4]
    [line] = [line for line in run.said if "FAILED" in line]
    assert line.startswith("SNAPSHOT FAILED (1 in a row): the snapshot of step 2 has been in flight for too long")
    assert line.endswith("The run goes on.")
