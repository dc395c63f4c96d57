"""The world: the processes of this attempt, how they start, talk, agree and end."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mingpt.config import WorldConfig
from mingpt.errors import Mistake

# torch 2.13 renamed it; the old name warns there, the new one is missing before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def share(rank: int, size: int, count: int) -> range:
    """The contiguous share of `count` items that process `rank` of `size` takes; even up to one item."""
    return range(rank * count // size, (rank + 1) * count // size)


def world_size() -> int:
    """The number of processes that the launcher announced; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def speaks_for_node() -> bool:
    """Whether this process prints what all processes of a node would print alike (before there is a world)."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@dataclass(frozen=True)
class World:
    """rank, size, local rank, device and backend of this attempt. Nothing that is stored may depend on them."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str

    @property
    def speaks(self) -> bool:
        """Whether this process prints and does what only one must do (console, metrics, the manifest)."""
        return self.rank == 0

    @property
    def wire(self) -> torch.device:
        """Where tensors must lie to be sent: gloo exchanges CPU memory only."""
        return torch.device("cpu") if self.backend == "gloo" else self.device

    def share(self, count: int) -> range:
        """This process's contiguous share of `count` items."""
        return share(self.rank, self.size, count)

    def gather(self, value: Any) -> list[Any]:
        """Every process's JSON value, by rank. JSON, not pickle: nothing that arrives can run code."""
        if self.size == 1:
            return [value]
        raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.empty(self.size, dtype=torch.int64)
        all_gather(sizes, torch.tensor([raw.numel()]))
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: raw.numel()] = raw
        everything = torch.empty(self.size * longest, dtype=torch.uint8)
        all_gather(everything, padded)
        rows = everything.view(self.size, longest)
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, sizes.tolist(), strict=True)]

    def from_speaker(self, value: Any) -> Any:
        """The speaking process's JSON value, in every process."""
        return self.gather(value if self.speaks else None)[0]

    def agree(self, what: str, value: str) -> None:
        """Raise Mistake in every process unless all of them have the same value."""
        values = self.gather(value)
        if len(set(values)) > 1:
            seen = "; ".join(f"process {r}: {v}" for r, v in enumerate(values) if v != values[0])
            raise Mistake(f"the processes have different {what} (process 0: {values[0]}; {seen}): make them equal")

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def _device(config: WorldConfig, local_rank: int) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise Mistake(
            f"world.device={config.device}: process {local_rank} of this node needs a GPU of its own, but "
            f"{torch.cuda.device_count()} are visible: start fewer processes a node, or use world.device=cpu",
            everywhere=False,
        )
    return torch.device("cuda", local_rank)


@contextmanager
def join(config: WorldConfig) -> Iterator[World]:
    """Join the world that torchrun's variables describe, or be a world of one; leave it on every way out.

    Raises Mistake if the configured device or backend is not there.
    """
    environment = os.environ
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    device = _device(config, local_rank)
    backend = config.backend if config.backend != "auto" else ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and device.type == "cpu":
        raise Mistake("world.backend=nccl, but no GPU is visible: use world.backend=gloo, or auto")
    # On GPUs the small messages (JSON, agreement) go over gloo and gradients over nccl.
    backends = f"cpu:gloo,cuda:{backend}" if device.type == "cuda" else backend
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in environment:
        wait = timedelta(seconds=config.init_timeout_seconds)
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=wait)))
    else:
        store, rank, size = dist.HashStore(), 0, 1
    dist.init_process_group(
        backends, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=config.timeout_seconds)
    )
    try:
        yield World(rank, size, local_rank, device, backend)
    finally:
        dist.destroy_process_group()
