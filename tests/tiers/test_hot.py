"""The hot tier: what a crash costs, and what it never brings back."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mingpt.errors import Unreadable, UserError
from mingpt.tiers import hot
from tests.kits.disk_kit import machines, train
from tests.kits.node_kit import needs_mount
from tests.kits.run_kit import NewRun, Run
from tests.kits.snapshot_kit import save


@needs_mount
@pytest.mark.slow
def test_a_node_that_was_replaced_gets_the_step_from_the_memory_of_another_one(
    tmp_path: Path, text: Path, cache: Path, undisturbed: NewRun
) -> None:
    """In 16 bits, where a process has no more than its slice of the weights in float32.

    The only durable snapshot is that at the end.
    """
    hot_only = ("snapshot.every_steps=0", "snapshot.hot_every_steps=4", "train.eval_every=0", "precision=bf16")
    run = Run(str(tmp_path / "run"), text, cache, hot_only)
    with machines(tmp_path, "ada", "bob", "cyd") as (ada, bob, cyd):
        ended = train([(bob, 1), (ada, 2)], run.arguments(), killed_after=12)
        assert ended.codes == [[-9], [-9, -9]], ended.output
        assert (run.store.steps(), ada.hot_steps()) == ([], [12])
        ended = train([(cyd, 1), (ada, 2)], run.arguments())
        assert ended.codes == [[0], [0, 0]], ended.output
        assert "resumed from step 12 of /dev/shm" in ended.said["cyd"]
        assert [ada.hot_files(), cyd.hot_files()] == [{}, {}]  # removed: the run has finished
    assert run.digest() == undisturbed(*hot_only).digest()


def test_a_folder_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"mingpt-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="another user"):
        hot.open_hot(str(tmp_path), str(tmp_path / "run"), "a" * 32, 10)


def test_what_killed_runs_left_is_removed_after_a_day(tmp_path: Path) -> None:
    for name in ("old", "young"):
        save(hot.open_hot(str(tmp_path), str(tmp_path / name), "a" * 32, 10), 1)
    base = tmp_path / f"mingpt-{os.getuid()}"
    [old] = base.glob("old-*")
    for path in (old, *old.iterdir()):
        os.utime(path, (0, time.time() - hot.STALE_SECONDS - 10))
    hot.open_hot(str(tmp_path), str(tmp_path / "own"), "b" * 32, 10)
    assert sorted(p.name.partition("-")[0] for p in base.iterdir()) == ["own", "young"]


def test_the_next_snapshots_take_the_place_of_those_that_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is free but what the committed one takes."""
    monkeypatch.setattr(hot.shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    open_for = partial(hot.open_hot, str(tmp_path), str(tmp_path / "run"), "a" * 32)
    save(store := open_for(0, spare_bytes=0), 1)
    size = sum(path.stat().st_size for path in Path(store.folder(1)).iterdir())
    open_for(size // 2, spare_bytes=0)
    with pytest.raises(UserError, match="two snapshots take"):
        open_for(size // 2 + 1, spare_bytes=0)
    with pytest.raises(UserError, match=rf"^snapshot\.hot_dir={tmp_path}: two snapshots take 1024 MiB"):
        open_for(size // 2, spare_bytes=hot.NCCL_BYTES)

    # Another process of the node removes its temporary files as the space is measured: all else still makes room.
    vanished, real = list[str](), os.scandir

    @contextmanager
    def scandir(path: Any) -> Iterator[Any]:
        """The file goes between the listing and the look at what is listed."""
        with real(path) as entries:
            listed = [*entries]
        for entry in listed:
            if entry.name == ".x.tmp":
                os.unlink(entry.path)
                vanished.append(entry.name)
        yield iter(listed)

    for folder in (store.root, store.folder(1)):
        Path(folder, ".x.tmp").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        open_for(size // 2, spare_bytes=0)
    assert vanished == [".x.tmp"] * 2

    store.set_aside(1)  # stays
    with pytest.raises(UserError, match="two snapshots take"):
        open_for(1, spare_bytes=0)


def test_a_folder_in_memory_belongs_to_one_run_directory(tmp_path: Path) -> None:
    """A copy of a run has the same random id; another place of the same name has not."""
    run, copy, link = (str(tmp_path / name) for name in ("a/run", "b/run", "link"))
    Path(run).mkdir(parents=True)
    Path(link).symlink_to(run)
    own = hot.folder("/m", run, "a" * 32)
    assert {hot.folder("/m", same, "a" * 32) for same in (run + "/", link)} == {own}
    assert len({own, hot.folder("/m", copy, "a" * 32), hot.folder("/m", run, "b" * 32)}) == 3
    assert hot.find_run_id(run) is None
    assert hot.run_id(run) == hot.run_id(run) == hot.find_run_id(run) != hot.run_id(copy)


def test_a_run_id_that_can_not_be_read_is_not_a_missing_one(
    tmp_path: Path, failing: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a new one the run's hot snapshots would be those of another run."""
    run = str(tmp_path / "run")
    save(hot.open_hot(str(tmp_path), run, hot.run_id(run), 10), 1)
    failing(tmp_path / "run/run-id")
    for ask in (hot.run_id, hot.find_run_id, lambda run: hot.find_hot(str(tmp_path), run)):
        with pytest.raises(Unreadable, match="run-id"):
            ask(run)
    monkeypatch.undo()
    assert (memory := hot.find_hot(str(tmp_path), run)) is not None
    assert memory.steps() == [1]
