"""The two tiers together: which of them is due, which has the newer step, and from which a restart goes on.

Attempts with real writers and stores and a state for each step, without the training.
"""

from itertools import product
from pathlib import Path
from shutil import rmtree
from threading import Event
from typing import Any

import pytest
from torch import Tensor

from mingpt.config.schema import Config
from mingpt.snapshot.attempts import Attempt, RunRecord
from mingpt.snapshot.format import Manifest, Metrics
from mingpt.snapshot.lineage import HotBase
from mingpt.snapshot.restore import Put, Restored
from mingpt.snapshot.store import Store
from mingpt.tiers.checkpointer import Checkpointer
from mingpt.tiers.tiers import Tiers, newest
from tests.kits.config_kit import configured
from tests.kits.snapshot_kit import ALONE, PROVENANCE, save, state_of


@pytest.fixture(scope="module")
def plain() -> Config:
    return configured("data=random", "world.device=cpu", "snapshot.asynchronous=false")


class Nobody:
    """Hears of snapshots, and does nothing."""

    def committed(self, step: int, digest: str, seconds: float) -> None: ...
    def committed_hot(self, step: int) -> None: ...
    def lost(self, step: int, in_a_row: int, reason: str) -> None: ...


class Run:
    def __init__(self, plain: Config, folder: Path, every: int, hot_every: int) -> None:
        self.dir, self.memory = str(folder / "run"), folder / "memory"
        self.memory.mkdir()
        tiers = {"dir": f"{self.dir}/snapshots", "hot_dir": str(self.memory), "every_steps": every}
        snapshot = plain.snapshot.model_copy(update=tiers | {"hot_every_steps": hot_every, "keep": 99})
        place = plain.run.model_copy(update={"dir": self.dir})
        self.config = plain.model_copy(update={"run": place, "snapshot": snapshot})
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
        return Checkpointer(self.config, tiers, record, Nobody()), loaded

    def killed_after(self, last: int) -> tuple[int, str, list[int]]:
        """An attempt that is killed after step `last`: from which step and tier it went on, and when it was due."""
        checkpointer, loaded = self.begin()
        start, due = loaded.manifest.step if loaded else 0, list[int]()
        for step in range(start + 1, last + 1):
            flags = checkpointer.flags(stop=False)
            if checkpointer.is_due(step, flags, best=False):
                due.append(step)
                checkpointer.after_step(step, lambda step=step: (state_of(step), Metrics(loss=1.0)), flags, best=False)  # type: ignore[misc]
                if checkpointer.hot_writer:
                    checkpointer.hot_writer.wait_until_idle()
        return start, self.tier(loaded), due

    def tier(self, loaded: Restored | None) -> str:
        return "" if loaded is None else "memory" if loaded.url.startswith(str(self.memory)) else "disk"

    def hot_steps(self) -> list[int]:
        return [step for folder in self.memory.glob("mingpt-*/*") for step in Store(str(folder)).steps()]


def multiples(every: int, after: int, last: int) -> set[int]:
    return {step for step in range(after + 1, last + 1) if every and step % every == 0}


INTERVALS = [*product((0, 2, 3, 4), repeat=2)]  # none, equal ones, multiples, and neither


@pytest.mark.parametrize(("every", "hot_every"), INTERVALS)
def test_each_tier_has_its_steps_and_a_restart_goes_on_from_the_newest(
    every: int, hot_every: int, plain: Config, tmp_path: Path
) -> None:
    """Three attempts that are killed, and a fourth one on a new node."""
    run = Run(plain, tmp_path, every, hot_every)
    start, tier, on_disk, in_memory = 0, "", set[int](), 0
    for last in (7, 10, 15):
        durable, hot = multiples(every, start, last), multiples(hot_every, start, last)
        assert run.killed_after(last) == (start, tier, sorted(durable | hot))
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


@pytest.mark.parametrize(
    ("on_disk", "in_memory", "from_step", "tier"),
    [
        (8, 6, 8, "disk"),
        (6, 8, 8, "memory"),
        (6, 6, 6, "memory"),
        (6, 0, 6, "disk"),
        (0, 6, 6, "memory"),
        (0, 0, 0, ""),
    ],
)
@pytest.mark.parametrize(
    "grew_from", ["the one before", "the newest"]
)  # as the note says: the writer may die before it
def test_a_restart_goes_on_from_whichever_tier_has_the_newer_step(
    on_disk: int, in_memory: int, from_step: int, tier: str, grew_from: str, plain: Config, tmp_path: Path
) -> None:
    run = Run(plain, tmp_path, 0, 5)
    checkpointer, _ = run.begin()
    durable, memory = checkpointer.store, checkpointer.tiers.hot_store
    assert memory
    provenance = PROVENANCE | {"history": [{"attempt": 1, "from_step": 0}]}
    for step in filter(None, (on_disk and 4, on_disk)):
        digest = save(durable, step, provenance=provenance)
        if step == 4 or grew_from == "the newest":
            HotBase(1, step, digest).write(memory)
    if in_memory:
        save(memory, in_memory, provenance=provenance)
    assert newest(run.config) == from_step
    again, loaded = run.begin()
    assert (loaded.manifest.step if loaded else 0, run.tier(loaded)) == (from_step, tier)
    assert loaded is None or again.tiers.is_durable(loaded) == (on_disk >= in_memory)
    assert run.hot_steps() == [in_memory] * (in_memory > 0)  # nothing is thrown away
    # It goes on: the next hot step is the newest, whatever came before.
    assert run.killed_after(10)[:2] == (from_step, tier)
    assert run.hot_steps() == [10]
    assert run.killed_after(10)[:2] == (10, "memory")


def test_a_write_to_memory_that_never_returns_costs_no_durable_snapshot(
    plain: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write, began, over = Run(plain, tmp_path, 4, 2), Store.write_part, Event(), Event()

    def write_part(self: Store, step: int, *part: Any) -> None:
        if self.key == "snapshot.hot_dir":
            began.set()
            over.wait()
        write(self, step, *part)

    monkeypatch.setattr(Store, "write_part", write_part)
    checkpointer, _ = run.begin()
    assert checkpointer.hot_writer
    checkpointer.hot_writer.hang_seconds = 0
    try:
        for step in range(1, 9):
            flags = checkpointer.flags(stop=False)
            if checkpointer.is_due(step, flags, best=False):
                checkpointer.after_step(step, lambda step=step: (state_of(step), Metrics(loss=1.0)), flags, best=False)  # type: ignore[misc]
                assert began.wait(60)
        assert checkpointer.last(9, (state_of(9), Metrics(loss=1.0)), stopping=True)
        checkpointer.close()
    finally:
        over.set()
    assert checkpointer.store.steps() == [9, 8, 4]
    [line] = [line for line in run.said if "FAILED" in line]
    assert line.startswith("SNAPSHOT FAILED (1 in a row): the snapshot of step 2 has been in flight for too long")
    assert line.endswith("The run goes on.")
