"""What is done for NCCL, by recorded calls: in which order a failed process leaves, and what is sent before step 1."""

import os
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from config_kit import configured
from mingpt.world import joining, warmup
from mingpt.world.joining import ReportedFailure, join
from mingpt.world.world import World


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of `join` on a GPU, in a world of two."""
    made = list[str]()
    store = dist.HashStore()

    def timer(seconds: float, code: int) -> str:
        made.append(f"exits with {code}")
        return "a timer"

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_NCCL_RETHROW_CUDA_ERRORS", "")
    os.environ.pop("TORCH_NCCL_RETHROW_CUDA_ERRORS")
    monkeypatch.setattr(joining, "_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(joining, "_connect_store", lambda *_: store)
    monkeypatch.setattr(joining, "_own_namespace", lambda *_: store)
    monkeypatch.setattr(joining, "_choose_interface", lambda *_: None)
    monkeypatch.setattr(joining, "_each", lambda world: 1)
    monkeypatch.setattr(joining, "_exit_after", timer)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.append(f"device {device}"))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: made.append("joined"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: made.append("left"))
    return made


def test_a_process_that_fails_does_not_wait_for_the_others_and_keeps_its_code(calls: list[str]) -> None:
    def fail() -> None:
        with join(configured().world) as world:
            assert world.backend == "nccl"
            calls.append("said why")
            raise ReportedFailure(64)

    with pytest.raises(ReportedFailure, match="exit code 64"):
        fail()
    assert calls == ["device cuda:0", "joined", "said why", "exits with 64"]


def test_a_process_that_has_done_its_work_leaves(calls: list[str]) -> None:
    with join(configured().world):
        assert os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] == "0"  # so that the main thread says what is wrong
    assert calls == ["device cuda:0", "joined", "left"]


def test_each_collective_is_tried_in_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[tuple[str, object]]()
    names = ("all_to_all", "all_gather", "all_reduce")
    for name in names:
        record = lambda *_, group, name=name: sent.append((name, group))  # noqa: E731
        monkeypatch.setattr(warmup, name, record)
    alone = World(1, 6, 1, torch.device("cpu"), "nccl")
    node = replace(alone, size=3, group=cast(Any, "node"))
    warmup.warm_up(replace(alone, inside=node, across=replace(node, size=2, group=cast(Any, "across"))), 1000)
    assert sorted(sent, key=str) == sorted(((n, g) for n in names for g in (None, "node", "across")), key=str)
