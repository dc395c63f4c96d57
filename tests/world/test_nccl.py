"""In which order a process leaves a world on GPUs, by recorded calls: NCCL waits for whoever does not answer."""

import os
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist

from mingpt.world import joining
from mingpt.world.joining import ReportedFailure, join
from tests.kits.config_kit import configured
from tests.kits.node_kit import wait_until


def test_a_process_that_fails_does_not_wait_for_the_others_and_keeps_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    store, calls = dist.HashStore(), Mock()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "NCCL_LAUNCH_ORDER_IMPLICIT"):
        monkeypatch.setenv(name, "")  # so that what `join` sets does not stay
        monkeypatch.delenv(name)
    device = torch.device("cuda")
    for name, found in {"open_attempt_store": (store, None), "_each": 1}.items():
        monkeypatch.setattr(joining, name, Mock(return_value=found))
    monkeypatch.setattr(joining, "LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(joining, "exit_now", calls.exits)
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(dist, "init_process_group", Mock())
    monkeypatch.setattr(dist, "destroy_process_group", calls.leaves)

    def fail() -> None:
        with join(configured().world, device) as world:
            raise ReportedFailure(64 if world.backend == "nccl" else 70)

    with pytest.raises(ReportedFailure):
        fail()
    wait_until(lambda: calls.mock_calls, "it ends without leaving")
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    assert calls.mock_calls == [call.exits(64)]
    with join(configured().world, device):  # one that has done its work
        pass
    assert calls.mock_calls[1:] == [call.leaves()]
