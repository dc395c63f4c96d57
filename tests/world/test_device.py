"""Which GPU a process takes, by how many torch sees: torch's answers are the test's."""

import pytest
import torch

from mingpt.errors import UserError
from mingpt.world.joining import _device
from tests.kits.config_kit import configured
from tests.kits.told import Told


@pytest.mark.parametrize("backend", ["gloo", "nccl", "auto"])
def test_processes_share_gpus_with_gloo_only(backend: str, monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    world = configured(f"world.backend={backend}").world
    gpus = [torch.device("cuda", index) for index in range(2)]
    assert [_device(world, local_rank) for local_rank in range(2)] == gpus
    if backend == "gloo":
        assert _device(world, 2) == gpus[0]
    else:
        with told.mistake():
            _device(world, 2)


def test_without_a_gpu_there_is_none_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match=r" 0 are visible: .*, or use world.device=cpu$"):
        _device(configured("world.backend=gloo", "world.device=cuda").world, 0)
