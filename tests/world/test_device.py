"""Which GPU a process takes, by how many torch sees: torch's answers are the test's."""

import pytest
import torch

from mingpt.errors import UserError
from mingpt.world.joining import _device
from tests.kits.config_kit import configured
from tests.kits.told import Told


@pytest.mark.parametrize(
    ("visible", "backend", "devices"),
    [
        (1, "gloo", [0, 0, 0]),
        (2, "gloo", [0, 1, 0]),
        (4, "gloo", [0, 1, 2]),
        (3, "nccl", [0, 1, 2]),
        (3, "auto", [0, 1, 2]),
    ],
)
def test_processes_share_gpus_with_gloo_only(
    monkeypatch: pytest.MonkeyPatch, visible: int, backend: str, devices: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    world = configured(f"world.backend={backend}").world
    assert [_device(world, local_rank) for local_rank in range(3)] == [torch.device("cuda", i) for i in devices]


@pytest.mark.parametrize("backend", ["nccl", "auto"])
def test_nccl_takes_each_gpu_once(monkeypatch: pytest.MonkeyPatch, told: Told, backend: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with told.mistake():
        _device(configured(f"world.backend={backend}").world, 1)


def test_without_a_gpu_there_is_none_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=r" 0 are visible: .*, or use world.device=cpu$"):
        _device(configured("world.backend=gloo", "world.device=cuda").world, 0)
