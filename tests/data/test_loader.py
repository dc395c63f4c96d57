"""What the trainer sees when a loader process dies: one error with one meaning, wherever the death is noticed."""

import inspect
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from mingpt.compute.batches import BatchPlan, RankSampler
from mingpt.data import loader
from mingpt.data.synthetic import RandomTokens
from tests.kits.paths_kit import ran

SAMPLES, WORK = RandomTokens(7, 9, 2), RankSampler(BatchPlan(9, 1, 1, 1), range(1), 0, 9)


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    """A caught error keeps its loader, and Python's end would wait for it: its processes ignore SIGTERM."""
    yield
    for child in multiprocessing.active_children():
        with suppress(RuntimeError):  # torch's, of a loader that is not ours any more
            child.kill()
            child.join()
        child.join()


def waiting() -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=signal.pause)
    process.start()
    return process


@pytest.mark.slow
def test_a_death_that_an_observer_was_told_of_ends_the_next_read() -> None:
    before = {*multiprocessing.active_children()}
    items: Any = loader.load(SAMPLES, WORK, 1, 600.0, torch.device("cpu"))
    [process] = {*multiprocessing.active_children()} - before
    next(items)
    assert process.pid is not None
    with suppress(RuntimeError):  # what an observer does with errors: torch raises its own here, once
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        time.sleep(0)
    # Otherwise torch's clean-up would wait for a lock, which the killed process may have held.
    inspect.getgeneratorlocals(items)["loader"]._shutdown = True
    with pytest.raises(RuntimeError, match=rf"^DataLoader worker \(pid {process.pid}\) has ended: exit code -9$"):
        next(items)


@pytest.mark.parametrize("error", [ConnectionResetError("by peer"), EOFError(), ConnectionRefusedError("there")])
def test_a_connection_that_a_dying_process_closed_is_its_death(error: Exception) -> None:
    dying = waiting()
    assert dying.pid is not None
    pid = dying.pid

    def read(_: int) -> Any:
        os.kill(pid, signal.SIGKILL)
        raise error

    with pytest.raises(RuntimeError, match=rf"^DataLoader worker \(pid {pid}\) has ended: exit code -9$"):
        next(loader._raised(map(read, [0]), [dying]))


def test_a_connection_that_ends_while_all_live_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "DYING_SECONDS", 0.01)

    def read(_: int) -> Any:
        raise ConnectionResetError("by a store")

    with pytest.raises(ConnectionResetError, match=r"^by a store$"):
        next(loader._raised(map(read, [0]), [waiting()]))


SMALL = """
import os, sys
import torch
from mingpt.compute.batches import BatchPlan, RankSampler
from mingpt.data import loader
from mingpt.data.synthetic import RandomTokens
from mingpt.errors import UserError
if __name__ == "__main__":
    samples, work = RandomTokens(7, 9, int(sys.argv[1])), RankSampler(BatchPlan(9, 9, 9, 1), range(9), 0, 9)
    try:
        print(sum(1 for _ in loader.load(samples, work, 1, 600.0, torch.device("cpu"))))
    except UserError as error:
        print(error)
    sys.stdout.flush()
    os._exit(0)  # as the trainer ends: an error keeps its loader
"""


class OnAFullDisk(RandomTokens):
    def __getitem__(self, ids: Any) -> Any:
        raise RuntimeError("cache/tokens: No space left on device")


def test_without_loader_processes_a_full_disk_is_not_their_shared_memory() -> None:
    with pytest.raises(RuntimeError, match="cache/tokens"):
        next(loader.load(OnAFullDisk(7, 9, 2), WORK, 0, 600.0, torch.device("cpu")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "block", "said"),
    [("32k", 2, "/dev/shm .*data.workers=0"), ("256k", 40_000, "/dev/shm .*data.workers=0"), ("256k", 2000, "81")],
)
def test_a_small_shared_memory_is_told_at_once(size: str, block: int, said: str, tmp_path: Path) -> None:
    """Of 64 MB in a container: its semaphores do not fit, or its microbatches; or all of it does."""
    (program := tmp_path / "program.py").write_text(SMALL)
    small = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
    ended = ran(["unshare", "-m", "bash", "-c", small, "bash", sys.executable, program, block])
    assert re.fullmatch(f"{said}\n", ended.stdout), ended.stderr
    assert "Traceback" not in ended.stderr
