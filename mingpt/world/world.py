"""The world: the processes of this attempt, and how they talk and agree."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mingpt.errors import UserError

# torch 2.13 renamed it; the old name warns there, the new one is missing before.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def share(rank: int, size: int, count: int) -> range:
    """The contiguous share of `count` items that process `rank` of `size` takes; even up to one item."""
    return range(rank * count // size, (rank + 1) * count // size)


@dataclass(frozen=True)
class World:
    """rank, size, local rank, device and backend of this attempt. Weights and optimizer state never depend on them."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    backend: str
    group: dist.ProcessGroup | None = None  # for messages; None: the group of all

    @property
    def is_main(self) -> bool:
        """Whether this process prints and does what only one must do (console, metrics, the manifest)."""
        return self.rank == 0

    @property
    def comm_device(self) -> torch.device:
        """Where tensors must lie to be sent: gloo exchanges CPU memory only."""
        return torch.device("cpu") if self.backend == "gloo" else self.device

    def side_group(self, limit_seconds: float) -> "World":
        """The same processes with a group of their own, for a thread whose messages must not wait for training's."""
        if self.size == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_seconds))
        return replace(self, group=group)

    def node_group(self, identity: str, limit_seconds: float) -> "World":
        """The processes that have the same identity as this one, with a group of their own (see `side_group`)."""
        if self.size == 1:
            return self
        identities = self.gather(identity)
        mine = self
        for node in sorted(set(identities)):  # every process takes part in making every group
            ranks = [rank for rank, other in enumerate(identities) if other == node]
            group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=limit_seconds))
            if node == identity:
                mine = replace(self, rank=ranks.index(self.rank), size=len(ranks), group=group)
        return mine

    def share(self, count: int) -> range:
        """This process's contiguous share of `count` items."""
        return share(self.rank, self.size, count)

    def gather(self, value: Any) -> list[Any]:
        """Every process's JSON value, by rank. JSON, not pickle: nothing that arrives can run code."""
        if self.size == 1:
            return [value]
        raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.empty(self.size, dtype=torch.int64)
        all_gather(sizes, torch.tensor([raw.numel()]), group=self.group)
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: raw.numel()] = raw
        everything = torch.empty(self.size * longest, dtype=torch.uint8)
        all_gather(everything, padded, group=self.group)
        rows = everything.view(self.size, longest)
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, sizes.tolist(), strict=True)]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON value, in every process. Takes less memory than `gather`, which has all values everywhere."""
        if self.size == 1:
            return value
        raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8) if self.is_main else None
        length = torch.tensor([0 if raw is None else raw.numel()])
        dist.broadcast(length, group=self.group, group_src=0)
        content = torch.empty(int(length), dtype=torch.uint8) if raw is None else raw
        dist.broadcast(content, group=self.group, group_src=0)
        return json.loads(content.numpy().tobytes())

    def run_on_main(self, ask: Callable[[], Any]) -> Any:
        """Run `ask` in rank 0 alone: every process gets its JSON value, or raises the same UserError."""
        answer: dict[str, Any] = {}
        if self.is_main:
            try:
                answer = {"value": ask()}
            except UserError as mistake:
                answer = {"problems": mistake.problems}
        answer = self.broadcast(answer)
        if "problems" in answer:
            raise UserError(*answer["problems"])
        return answer["value"]

    def broadcast_bytes(self, raw: memoryview | None, source: int, size: int) -> memoryview:
        """In every process, the `size` bytes that process `source` gives; in that one they are not copied."""
        content = torch.empty(size, dtype=torch.uint8) if raw is None else torch.frombuffer(raw, dtype=torch.uint8)
        if self.size > 1:
            dist.broadcast(content, src=source, group=self.group)
        return content.numpy().data

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.group)
