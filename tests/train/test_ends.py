"""A run is finished when its last step is durable, and only then; no failure of a tier or a thread goes unsaid.

Whole attempts, in this process: a world of one, with a real store and a real memory.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist

from mingpt.compute.stats import Flags
from mingpt.config.schema import WorldConfig
from mingpt.errors import CRASHED, FINISHED, STOPPED, USER_ERROR, SnapshotFailed
from mingpt.snapshot import writer as writer_module
from mingpt.snapshot.reader import read
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.store import Store
from mingpt.snapshot.writer import SnapshotWriter
from mingpt.tiers.checkpointer import Checkpointer
from mingpt.train.attempt import attempt
from mingpt.world.joining import join
from tests.kits.node_kit import wait_until
from tests.kits.replay_kit import Asked
from tests.kits.run_kit import TINY, in_forks
from tests.kits.snapshot_kit import ALONE, PROVENANCE, state_of
from tests.kits.told import Told

pytestmark = pytest.mark.usefixtures("outlived")
STEPS = 4


@pytest.fixture
def train(tmp_path: Path, text: Path, cache: Path) -> Callable[..., int]:
    """Runs an attempt of the run in tmp_path/run; returns its exit code."""

    def run(*overrides: str, stop_at: int = 0) -> int:
        places = (f"run.dir={tmp_path}/run", f"data.path={text}", f"data.cache_dir={cache}")
        memory = tmp_path / "memory"
        memory.mkdir(exist_ok=True)
        tiers = (f"snapshot.hot_dir={memory}", "snapshot.every_steps=0", "snapshot.retry_seconds=0")
        length = (f"train.max_steps={STEPS}", "train.eval_every=0", f"schedule.decay_steps={STEPS}")
        return attempt([*TINY, *places, *tiers, *length, *overrides], Asked(stop_at))

    return run


@pytest.fixture
def durable(tmp_path: Path) -> Store:
    return Store(f"{tmp_path}/run/snapshots")


def failing(monkeypatch: pytest.MonkeyPatch, key: str, error: OSError) -> None:
    """All writes of one tier fail."""
    plain = Store.write_part

    def write(self: Store, *arguments: Any) -> None:
        if self.key == key:
            raise error
        plain(self, *arguments)

    monkeypatch.setattr(Store, "write_part", write)


GRACE, HOT = "snapshot.grace_seconds=30", "snapshot.hot_every_steps=2"
NO_ANSWER = OSError(errno.EIO, "Input/output error")


def test_a_last_step_that_only_memory_has_is_made_durable_by_the_next_start(
    tmp_path: Path,
    train: Callable[..., int],
    durable: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing(monkeypatch, "snapshot.dir", NO_ANSWER)
    assert train(GRACE, HOT, stop_at=STEPS) == STOPPED
    assert f"starts from step {STEPS} on these nodes" in capsys.readouterr().out
    monkeypatch.undo()
    assert train(GRACE, HOT) == FINISHED
    assert f"finished: step {STEPS}, digest {read(durable, STEPS).manifest.digest}\n" in capsys.readouterr().out
    assert list((tmp_path / "memory").glob("mingpt-*/*")) == []
    assert train(GRACE, HOT) == FINISHED


@pytest.mark.parametrize(
    ("key", "number", "code", "steps"),
    [
        ("snapshot.dir", errno.EIO, STOPPED, ([], [3])),
        ("snapshot.dir", errno.ENOSPC, USER_ERROR, ([], [3])),
        ("snapshot.hot_dir", errno.ENOSPC, STOPPED, ([3], [])),
    ],
)
def test_a_tier_that_fails_does_not_cost_the_others_snapshot(
    tmp_path: Path,
    train: Callable[..., int],
    durable: Store,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    number: int,
    code: int,
    steps: tuple[list[int], list[int]],
) -> None:
    failing(monkeypatch, key, OSError(number, os.strerror(number)))
    assert train(GRACE, HOT, stop_at=3) == code
    monkeypatch.undo()
    memory = [step for folder in (tmp_path / "memory").glob("mingpt-*/*") for step in Store(str(folder)).steps()]
    assert (durable.steps(), memory) == steps


def test_going_back_by_deleting_newer_steps_is_not_undone_by_memory(
    train: Callable[..., int], durable: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    every = ("snapshot.every_steps=2", "snapshot.hot_every_steps=3")
    assert train(*every, stop_at=3) == STOPPED
    capsys.readouterr()
    assert durable.steps() == [3, 2]
    durable.delete(3)
    assert train(*every) == FINISHED
    assert "resumed from step 2 of " in capsys.readouterr().out


def test_the_best_evaluation_has_a_snapshot_whenever_it_comes(train: Callable[..., int], durable: Store) -> None:
    """Evaluations every 3 steps and snapshots every 4: they meet at 12."""
    more = ("train.max_steps=11", "train.eval_every=3", "snapshot.every_steps=4", "snapshot.keep=1")
    assert train(*more) == FINISHED
    assert set(durable.steps()) in ({9, 11}, {11})  # the last step is evaluated, too


# --- the thread ---


@pytest.mark.parametrize(
    ("where", "error"), [("encode_part", ZeroDivisionError("by zero")), ("digest_of", SystemExit("by zero"))]
)
def test_a_thread_that_raises_anything_is_heard_and_counts(
    where: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, lost, store = list[str](), list[int](), Store(str(tmp_path))
    writer = SnapshotWriter(
        store, ALONE, Retention(9), PROVENANCE, said.append, lost=lambda step, in_a_row, why: lost.append(step)
    )
    with monkeypatch.context() as patch:
        patch.setattr(writer_module, where, Mock(side_effect=error))
        writer.start(1, state_of(1))
        with pytest.raises(SnapshotFailed, match="by zero"):
            writer.wait()
    assert (writer.failures, writer.broken, lost) == (1, False, [1])
    assert ["by zero" in line for line in said] == [True]
    writer.save(2, state_of(2))
    assert writer.failures == 0


def write_together(folder: Path) -> None:
    """One of two processes. The second one's first write takes until the first one has given up waiting for it."""
    plain, said = Store.write_part, list[str]()

    def write(self: Store, *arguments: Any) -> None:
        if world.rank == 1:
            wait_until((folder / "gone").exists, "the first one has given up")
        plain(self, *arguments)

    with join(WorldConfig(device="cpu")) as world, patch.object(Store, "write_part", write):
        side = world.side_group(60)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), side.group)  # to make it may take longer
        writer = SnapshotWriter(Store(f"{folder}/snapshots"), side, Retention(9), PROVENANCE, said.append)
        writer.start(1, state_of(1))
        with pytest.raises(SnapshotFailed, match="snapshot of step 1"):
            writer.wait(200)
        (folder / "gone").touch()
        assert (writer.failures, writer.broken, len(said)) == (1, True, 1)


@pytest.mark.slow
def test_processes_that_cannot_agree_say_so_and_the_run_ends(tmp_path: Path) -> None:
    """The side group's limit is 2 s, and a write takes longer."""
    in_forks(2, write_together, tmp_path)


def test_a_writer_that_is_broken_in_one_process_ends_the_run_in_all(
    train: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Checkpointer.is_due

    def another_is_broken(self: Checkpointer, step: int, flags: Flags, best: bool) -> bool:
        return plain(self, step, replace(flags, gave_up=step == 3), best)

    monkeypatch.setattr(Checkpointer, "is_due", another_is_broken)
    assert train() == CRASHED


def test_the_processes_wait_longer_for_each_other_than_any_of_them_may_wait_for_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that goes on failing gives up within writer.limit_seconds, however long retry_seconds is."""
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    failing(monkeypatch, "snapshot.dir", NO_ANSWER)
    writer = SnapshotWriter(
        Store(str(tmp_path)), ALONE, Retention(9), PROVENANCE, lambda line: None, retry_seconds=1e6, limit_seconds=100
    )
    with pytest.raises(SnapshotFailed):
        writer.save(1, state_of(1))
    assert clock[0] <= 100


@pytest.mark.parametrize("split", ["train", "validation"])
def test_data_without_a_target_are_refused_before_anything_is_written(
    train: Callable[..., int], tmp_path: Path, split: str, capfd: pytest.CaptureFixture[str], told: Told
) -> None:
    counts = {"train": 64, "validation": 64} | {split: 0}
    own = [f"data.{name}={count}" for name, count in counts.items()]
    assert train("data._target_=tests.kits.own_kit.masked", *own) == USER_ERROR
    told(capfd.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_step_without_a_target_is_named(train: Callable[..., int], capfd: pytest.CaptureFixture[str]) -> None:
    """One sample of 64 has targets, so one step of four."""
    own = ("data._target_=tests.kits.own_kit.masked", "data.train=1", "data.validation=64")
    assert train(*own) == FINISHED
    assert capfd.readouterr().out.count("no target of its samples counts") == 3
