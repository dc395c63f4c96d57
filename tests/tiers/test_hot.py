"""The hot tier: what a crash costs, and what it never brings back."""

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mingpt.errors import Unreadable, UserError
from mingpt.snapshot.format import MANIFEST
from mingpt.snapshot.store import Store
from mingpt.tiers import hot
from tests.kits.node_kit import Node, free_port, needs_mount, wait_until
from tests.kits.run_kit import NewRun, Run
from tests.kits.snapshot_kit import save

# The only durable snapshot is that at the end.
HOT = ("train.max_steps=120", "train.eval_every=0", "snapshot.every_steps=0", "snapshot.hot_every_steps=10")


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def command(run: Run, memory: Path, *launcher: str) -> list[str]:
    tier = (f"snapshot.hot_dir={memory}", "snapshot.asynchronous=true")
    return [sys.executable, "-m", *launcher, *run.arguments(*HOT, *tier)]


def step_of(line: str, memory: Path) -> int:
    """The step whose line this is, or 0. Where it leaves a hot snapshot, this waits until nothing else is there."""
    match = re.match(r"step +(\d+)/", line)
    step = int(match[1]) if match else 0

    def is_alone() -> bool:
        with suppress(FileNotFoundError):  # the one before is deleted while we look
            kept = {(path.parent.name, path.name) for path in memory.glob("mingpt-*/*/step-*/*")}
            return {folder for folder, _ in kept} == {f"step-{step:09d}"} and (f"step-{step:09d}", MANIFEST) in kept
        return False

    if 0 < step < 120 and step % 10 == 0:
        wait_until(is_alone, f"the hot snapshot of step {step}")  # the run waits for us, so none is left out
    return step


@pytest.mark.slow
def test_a_run_that_only_leaves_hot_snapshots_goes_on_from_the_memory_of_its_node(
    memory: Path, new_run: NewRun, undisturbed: NewRun
) -> None:
    """A worker is killed twice, then all of the node; another number of processes goes on. In 16 bits, where a process
    has no more than its slice of the weights in float32.
    """
    run = new_run("precision=bf16")
    node = Node(command(run, memory, "mingpt.launch", "--nproc-per-node=2", "launch.max_attempts_without_progress=1"))
    killed: list[int] = []

    def kill(line: str) -> None:
        if (step := step_of(line, memory)) >= 25 + 30 * len(killed):
            killed.append(step)
            if len(killed) < 3:
                os.kill(node.workers()[0], signal.SIGKILL)
            else:
                node.kill()

    node.on_line = kill
    node.wait()
    assert len(killed) == 3, node.output[-4000:]
    assert run.store.steps() == []
    node = Node(command(run, memory, "mingpt.train"))
    assert node.wait() == 0, node.output
    assert re.findall(rf"resumed from step (\d+) of {memory}", node.output) == ["80"]
    assert run.digest() == undisturbed(*HOT, "precision=bf16").digest()
    assert list(memory.glob("mingpt-*/*")) == []  # removed: the run has finished


@needs_mount
@pytest.mark.slow
def test_a_node_that_was_replaced_gets_the_step_from_another_ones_memory(
    memory: Path, new_run: NewRun, undisturbed: NewRun
) -> None:
    run = new_run()

    def start() -> list[Node]:
        port, nodes = free_port(), []
        for rank in (0, 1):
            env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            train = command(run, memory, "mingpt.train")
            # Node 1's memory is its own, and gone with its processes.
            alone = ["unshare", "-m", "bash", "-c", f'mount -t tmpfs tmpfs {memory}; exec "$@"', "bash"]
            nodes.append(Node(train if rank == 0 else [*alone, *train], env))
        return nodes

    nodes = start()
    nodes[0].on_line = lambda line: nodes[0].kill() if step_of(line, memory) >= 55 else None
    nodes[0].wait()
    nodes[1].kill()
    nodes = start()
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    assert re.search(rf"resumed from step 50 of {memory}", nodes[0].output)
    assert run.digest() == undisturbed(*HOT).digest()


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


def full_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[[int], Store], Store, int]:
    """Memory with one snapshot and nothing free: what opens it for so many bytes, its store, the snapshot's bytes."""
    monkeypatch.setattr(hot.shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    open_for = partial(hot.open_hot, str(tmp_path), str(tmp_path / "run"), "a" * 32, spare_bytes=0)
    save(store := open_for(0), 1)
    return open_for, store, sum(path.stat().st_size for path in Path(store.folder(1)).iterdir())


def test_the_next_snapshots_take_the_place_of_those_that_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_for, store, size = full_memory(tmp_path, monkeypatch)
    open_for(size // 2)
    with pytest.raises(UserError, match="two snapshots take"):
        open_for(size // 2 + 1)
    store.set_aside(1)  # stays
    with pytest.raises(UserError, match="two snapshots take"):
        open_for(1)


def test_a_file_that_vanishes_as_the_space_is_measured_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process of the node removes its temporary files meanwhile. All else still makes room."""
    open_for, store, size = full_memory(tmp_path, monkeypatch)
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
    monkeypatch.setattr(os, "scandir", scandir)
    open_for(size // 2)
    assert vanished == [".x.tmp"] * 2


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


def test_a_run_id_that_can_not_be_read_is_not_a_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a new one the run's hot snapshots would be those of another run."""
    path, run, real = tmp_path / "run/run-id", str(tmp_path / "run"), os.fdopen
    save(hot.open_hot(str(tmp_path), run, identity := hot.run_id(run), 10), 1)
    bad = path.stat().st_ino

    def failing(descriptor: int, mode: str = "r") -> Any:
        if os.fstat(descriptor).st_ino == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", failing)
        patch.setattr("mingpt.files.localfile.PAUSES", (0.0, 0.0))
        for ask in (hot.run_id, hot.find_run_id, lambda run: hot.find_hot(str(tmp_path), run)):
            with pytest.raises(Unreadable, match="run-id"):
                ask(run)
    assert hot.find_run_id(run) == identity
    assert (memory := hot.find_hot(str(tmp_path), run)) is not None
    assert memory.steps() == [1]
