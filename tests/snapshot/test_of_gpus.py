"""Snapshots from GPUs, by recorded calls: what is pinned, and which device the writer's thread has."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mingpt.errors import UserError
from mingpt.snapshot import hot
from mingpt.snapshot.checkpointer import Flags
from mingpt.snapshot.staging import block_of, in_one_block
from mingpt.snapshot.store import Store
from mingpt.snapshot.writer import SnapshotWriter
from mingpt.train import stats
from mingpt.train.stats import StatsExchange
from mingpt.world.world import World
from snapshot_kit import ALONE, PROVENANCE


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    calls = list[tuple[int, int]]()

    def register(address: int, size: int, flags: int) -> int:
        calls.append((address, size))
        return 2 if size > 10**6 else 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    return calls


def test_all_buffers_are_one_pinned_block_without_a_gap(pinned: list[tuple[int, int]]) -> None:
    """A block for each would be rounded up to a power of two, and small ones would share pages."""
    tensors = {"a": torch.ones(10, 10), "step": torch.ones(()), "none": torch.ones(0), "c": torch.ones(3).double()}
    found = in_one_block(tensors, pinned=True)
    [(address, size)] = pinned
    assert size == 448 + 64 + 64
    assert [found[n].data_ptr() - address for n in ("a", "step", "c")] == [0, 448, 512]
    assert all((b.numel(), b.dtype) == (tensors[n].numel(), tensors[n].dtype) for n, b in found.items())


def test_memory_that_can_not_be_pinned_is_used_as_it_is(
    pinned: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small cgroup, a virtual GPU: the first snapshot of each attempt ended the run."""
    monkeypatch.setattr(torch, "ones", Mock(side_effect=RuntimeError("CUDA error: out of memory")))  # it sticks
    assert len(block_of(2_000_000, pinned=True)) == 2_000_000
    [line] = capsys.readouterr().out.splitlines()
    assert "2000000 bytes" in line
    assert "CUDA's error 2" in line


def test_the_writers_thread_has_the_device_of_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's is GPU 0, of which each process would take memory."""
    calls = list[tuple[str, object]]()
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: calls.append((threading.current_thread().name, device))
    )
    gpu = torch.device("cuda:3")
    for world in (ALONE, replace(ALONE, device=gpu)):
        writer = SnapshotWriter(Store(str(tmp_path)), world, cast(Any, None), PROVENANCE, print)
        writer._pool.submit(int).result()
        writer._pool.shutdown()
    assert calls == [("snapshot_0", gpu)]


class FromTheHost(TorchDispatchMode):
    """What is copied from the CPU's memory to the device `meta`: on a GPU the host would wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [a for a in args if isinstance(a, Tensor) and not a.is_meta]
        if isinstance(out, Tensor) and out.is_meta and given:
            self.found.append(func._schema.name)
        return out


def test_a_steps_figures_are_gathered_without_a_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "all_gather", lambda received, sent, async_op: None)
    meta = torch.device("meta")
    exchange = StatsExchange(World(0, 1, 0, meta, "nccl"), 2)
    scalars = [torch.zeros((), device=meta) for _ in range(2)]
    with FromTheHost() as copies:
        exchange.start(scalars, scalars, Flags(stop=True), (0.5, 0.25))
        assert copies.found == []
        torch.zeros(3, device=meta)[:] = torch.ones(3)  # what it must not do is seen
    assert copies.found == ["aten::copy_"]


def test_hot_snapshots_leave_nccl_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot.shutil, "disk_usage", lambda folder: SimpleNamespace(free=hot.NCCL_BYTES + 999))
    hot.open_hot(str(tmp_path), str(tmp_path), "a" * 32, 500)
    with pytest.raises(UserError, match=rf"^snapshot\.hot_dir={tmp_path}: .* 1024 MiB"):
        hot.open_hot(str(tmp_path), str(tmp_path), "a" * 32, 500, hot.NCCL_BYTES)
