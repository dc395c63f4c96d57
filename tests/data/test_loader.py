"""What the trainer sees when a loader process dies: one error with one meaning, wherever the death is noticed."""

import multiprocessing
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mingpt.compute.batches import RankSampler
from mingpt.data import loader
from mingpt.data.source import Samples


class Numbers(Samples):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, ids: Sequence[int]) -> tuple[Tensor, ...]:
        if 40 in ids:
            raise ValueError("there is no 40")
        return (torch.tensor(list(ids)),)


class Work(RankSampler):
    """Microbatches of one sample, in order."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        return ([n] for n in range(1000))


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    """A caught error keeps its loader, and Python's end would wait for it: its processes ignore SIGTERM."""
    yield
    for child in multiprocessing.active_children():
        with suppress(RuntimeError):  # torch's, of a loader that is not ours any more
            child.kill()
            child.join()
        child.join()


def batches() -> tuple[Iterator[Sequence[Tensor]], BaseProcess]:
    before = set(multiprocessing.active_children())
    items = loader.load(Numbers(), Work(), 1, 600.0, torch.device("cpu"))
    (process,) = set(multiprocessing.active_children()) - before
    return items, process


def waiting() -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=signal.pause)
    process.start()
    return process


def test_a_death_that_an_observer_was_told_of_ends_the_next_read() -> None:
    items, process = batches()
    assert [int(next(items)[0]) for _ in range(3)] == [0, 1, 2]
    assert process.pid is not None
    with suppress(RuntimeError):  # what an observer does with errors: torch raises its own here, once
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        time.sleep(0)
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


@pytest.mark.parametrize("where", ["here", "there"])
def test_an_error_of_a_file_is_passed_on_at_once(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without loader processes, and if one has told it: nobody is dying."""
    said = "data.bin" if where == "here" else "Caught FileNotFoundError in DataLoader worker process 0.\n…"

    def read(_: int) -> Any:
        raise FileNotFoundError(said)

    monkeypatch.setattr(loader, "wait", lambda processes, seconds: [] if not seconds else pytest.fail("it waits"))
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(said)}$"):
        next(loader._raised(map(read, [0]), [] if where == "here" else [waiting()]))


def test_a_connection_that_ends_while_all_live_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "DYING_SECONDS", 0.01)

    def read(_: int) -> Any:
        raise ConnectionResetError("by a store")

    with pytest.raises(ConnectionResetError, match=r"^by a store$"):
        next(loader._raised(map(read, [0]), [waiting()]))


def test_a_process_that_ended_while_others_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dies(DataLoader[Any]):
        def __iter__(self) -> Any:
            batches = super().__iter__()
            with suppress(RuntimeError):
                first = multiprocessing.active_children()[0]
                first.kill()
                first.join()
            return batches

    monkeypatch.setattr(loader, "DataLoader", Dies)
    with pytest.raises(
        RuntimeError, match=r"^DataLoader worker \(pid unknown\) has ended before the last one had started$"
    ):
        loader.load(Numbers(), Work(), 2, 600.0, torch.device("cpu"))


def test_what_the_data_raises_names_the_process_that_read_it() -> None:
    items, _ = batches()
    for _ in range(40):
        next(items)
    with pytest.raises(ValueError, match=r"^Caught ValueError in DataLoader worker process 0\.") as caught:
        next(items)
    assert re.search(r"^ValueError: there is no 40$", str(caught.value), re.M)
