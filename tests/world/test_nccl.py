"""In which order a process leaves a world on GPUs, by recorded calls: NCCL waits for whoever does not answer."""

import os
from dataclasses import replace
from typing import Any, cast
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist

from config_kit import configured
from mingpt.world import joining, warmup
from mingpt.world.joining import ReportedFailure, join
from mingpt.world.world import World
from node_kit import wait_until


def test_a_process_that_fails_does_not_wait_for_the_others_and_keeps_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    store, calls = dist.HashStore(), Mock()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "NCCL_LAUNCH_ORDER_IMPLICIT"):
        monkeypatch.setenv(name, "")  # so that what `join` sets does not stay
        monkeypatch.delenv(name)
    there = {"_device": torch.device("cuda"), "_connect_store": store, "_own_namespace": store, "_each": 1}
    for name, found in {**there, "_choose_interface": None}.items():
        monkeypatch.setattr(joining, name, Mock(return_value=found))
    monkeypatch.setattr(joining, "LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(joining, "exit_now", calls.exits)
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(dist, "init_process_group", Mock())
    monkeypatch.setattr(dist, "destroy_process_group", calls.leaves)

    def fail() -> None:
        with join(configured().world) as world:
            raise ReportedFailure(64 if world.backend == "nccl" else 70)

    with pytest.raises(ReportedFailure):
        fail()
    wait_until(lambda: calls.mock_calls, "it ends without leaving")
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"
    assert calls.mock_calls == [call.exits(64)]
    with join(configured().world):  # one that has done its work
        pass
    assert calls.mock_calls[1:] == [call.leaves()]


@pytest.mark.parametrize(("owners", "all_to_all"), [(False, ["inside", "across"]), (True, [None, "inside", "across"])])
def test_only_the_connections_that_steps_use_are_opened(
    owners: bool, all_to_all: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of two: without whole tensors for their owners, nothing goes from each process to each."""
    alone = World(0, 4, 0, torch.device("cpu"), "gloo")
    inside, across = (replace(alone, size=2, group=cast(Any, name)) for name in ("inside", "across"))
    calls = {name: Mock() for name in ("all_to_all", "all_gather", "all_reduce")}
    for name, mock in calls.items():
        monkeypatch.setattr(warmup, name, mock)
    warmup.warm_up(replace(alone, inside=inside, across=across), 10, owners)
    assert [c.kwargs["group"] for c in calls["all_to_all"].call_args_list] == all_to_all
    assert [c.kwargs["group"] for c in calls["all_gather"].call_args_list] == [None, "inside", "across"]
