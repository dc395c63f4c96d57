"""Snapshots beside the training: what is written is the state of its step, and what a slow or failing store does."""

import errno
import re
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mingpt.errors import USER_ERROR, SnapshotFailed
from mingpt.snapshot import writer as writer_module
from mingpt.snapshot.format import Manifest, Part
from mingpt.snapshot.reader import PARALLEL_PARTS, read, verify
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.staging import StagedPart
from mingpt.snapshot.store import Buffer, Store
from mingpt.snapshot.writer import SnapshotWriter
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from tests.kits.run_kit import NewRun
from tests.kits.snapshot_kit import ALONE, PROVENANCE, save, state_of


class Gate(Store):
    """A real store behind a door: writes wait until it is open, and the first `failing` ones fail."""

    def __init__(self, url: str, failing: int = 0) -> None:
        super().__init__(url)
        self.open, self.failing, self.tries = threading.Event(), failing, 0

    def write_part(self, step: int, name: str, pieces: Iterable[Buffer]) -> None:
        assert self.open.wait(200)
        self.tries += 1
        if self.tries <= self.failing:
            raise OSError(5, "Input/output error")
        super().write_part(step, name, pieces)


def writer(store: Store, said: list[str], **options: Any) -> SnapshotWriter:
    return SnapshotWriter(store, ALONE, Retention(9), PROVENANCE, said.append, **options)


def test_what_is_written_is_the_state_at_the_start_whatever_training_does_meanwhile(tmp_path: Path) -> None:
    store, committed = Gate(str(tmp_path)), list[tuple[int, str]]()
    under_way = writer(store, [], committed=lambda step, digest, seconds: committed.append((step, digest)))
    state = state_of(1)
    under_way.start(1, state)
    assert under_way.busy
    for tensors in state.values():
        for tensor in tensors.values():
            tensor.add_(1)  # the next update
    assert store.steps() == []
    store.open.set()
    digest = under_way.wait()
    assert digest == save(Store(str(tmp_path / "other")), 1) == read(store, 1).manifest.digest
    assert committed == [(1, digest)]
    under_way.start(2, state)  # into the same buffers
    assert under_way.wait() == save(Store(str(tmp_path / "other")), 2, state)


def test_a_write_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, pauses = Gate(str(tmp_path), failing=2), list[float]()
    monkeypatch.setattr(writer_module.time, "sleep", pauses.append)
    store.open.set()
    assert save(store, 1, retry_seconds=10) == read(store, 1).manifest.digest
    # Both of its parts, written at the same time, have failed once; or one of them twice.
    assert pauses in ([0.5, 0.5], [0.5, 1])


def test_a_failure_is_told_when_no_part_is_being_written_any_more(tmp_path: Path) -> None:
    """The next snapshot is copied into the same memory."""

    class Half(Store):
        def write_part(self, step: int, name: str, pieces: Iterable[Buffer]) -> None:
            if name.startswith("model"):
                raise OSError(5, "Input/output error")
            early.append(told.wait(0.5))

    told, early = threading.Event(), list[bool]()
    failing = writer(Half(str(tmp_path)), [], lost=lambda step, in_a_row, reason: told.set())
    failing.start(1, state_of(1))
    with pytest.raises(SnapshotFailed):
        failing.wait()
    assert early == [False]


class Pruned(Store):
    """Somebody's prune takes the parts for a dead writer's while the manifest is committed, so many times."""

    def __init__(self, url: str, prunes: int) -> None:
        super().__init__(url)
        self.prunes = prunes

    def check_parts(self, manifest: Manifest, more: Iterable[tuple[str, int]] = ()) -> None:
        if self.prunes and self.steps():
            self.prunes -= 1
            self.remove([file for file in self.files(manifest.step) if file.name in manifest.parts])
        super().check_parts(manifest, more)


@pytest.mark.parametrize("url", ["{}", "memory://{}"])
def test_no_snapshot_counts_as_stored_whose_parts_are_gone_once_its_manifest_is_there(tmp_path: Path, url: str) -> None:
    store, said = Pruned(url.format(tmp_path), prunes=1), list[str]()
    assert save(store, 3, log=said.append) == verify(store, 3).digest
    assert (store.prunes, len(said)) == (0, 1)
    store.delete(3)
    store.prunes = 2
    with pytest.raises(SnapshotFailed, match=r"step-000000003: model-.* is missing"):
        save(store, 3)
    assert store.steps() == []


def test_a_part_that_is_written_is_not_kept(tmp_path: Path) -> None:
    """The writer's thread puts slices together part by part: they are there only until they are written."""
    alive, most = weakref.WeakSet[torch.Tensor](), 0

    def staged() -> Iterator[StagedPart]:
        nonlocal most
        for i in range(4 * PARALLEL_PARTS):
            tensor = torch.full((100,), float(i))
            alive.add(tensor)
            most = max(most, len(alive))
            yield Part("model", i + 1, (f"w{i}",)), {f"w{i}": tensor}
            del tensor

    assert len(writer(Store(str(tmp_path)), []).write_parts(4, staged())["parts"]) == 4 * PARALLEL_PARTS
    assert most <= PARALLEL_PARTS + 1
    assert len(alive) == 0


def test_a_run_goes_on_without_snapshots_for_as_long_as_it_may(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full from step 8 on."""
    run, write = new_run("snapshot.max_failures=2"), Store.write_part

    def written(store: Store, step: int, *part: Any) -> None:
        if step >= 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(store, step, *part)

    monkeypatch.setattr(Store, "write_part", written)
    assert attempt(run.arguments(), Lifetime()) == USER_ERROR
    assert re.findall(r"^SNAPSHOT FAILED \((\d) in a row\)", capsys.readouterr().out, re.M) == ["1", "2"]
    assert run.store.steps() == [4]
