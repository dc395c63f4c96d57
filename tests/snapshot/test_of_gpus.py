"""Snapshots from GPUs, by recorded calls: what is pinned, and which device the writer's thread has."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from mingpt.snapshot.staging import block_of, in_one_block
from mingpt.snapshot.store import Store
from mingpt.snapshot.writer import SnapshotWriter
from tests.kits.snapshot_kit import ALONE, PROVENANCE


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
    tensors = {"a": torch.ones(10, 10), "step": torch.ones(()), "c": torch.ones(3).double()}
    found = in_one_block(tensors, pinned=True)
    [(address, size)] = pinned
    assert size == 448 + 64 + 64
    assert [found[n].data_ptr() - address for n in tensors] == [0, 448, 512]


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
