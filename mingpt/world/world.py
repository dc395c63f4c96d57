"""The world: the processes of this attempt, and the messages between them."""

import json
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.errors import UserError

Gather = Callable[[Any], list[Any]]  # a JSON value of every process, by rank


class Progress:
    """What this process has done, for the watchdog (liveness.py), whose thread reads it without a lock."""

    # The process's and not a World's: groups of a world share them, and the watchdog asks for what all have done.
    microbatches = 0  # read or evaluated
    collectives = 0  # entered
    groups: ClassVar = WeakSet[dist.ProcessGroup]()  # training's besides the default one
    recent: ClassVar = deque[str](maxlen=32)  # names of the last collectives: the same in all processes


def _counted(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    def enter(*arguments: Any, group: dist.ProcessGroup | None = None, **options: Any) -> Any:
        # Not those of the snapshot writers' threads, which have groups of their own: they come in another order in each
        # process, and a writer that goes on is no sign that training does.
        if group is None or group in Progress.groups:
            Progress.collectives += 1
            Progress.recent.append(name)
        return collective(*arguments, group=group, **options)

    return enter


# Renamed in torch 2.13, where the old name gives a warning.
all_gather = _counted("all_gather", getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)
all_to_all = _counted("all_to_all", dist.all_to_all_single)
all_reduce = _counted("all_reduce", dist.all_reduce)
_broadcast = _counted("broadcast", dist.broadcast)
_barrier = _counted("barrier", dist.barrier)


def share(rank: int, size: int, count: int) -> range:
    """The contiguous share of `count` items for process `rank` of `size`. Shares differ by at most one item."""
    return range(rank * count // size, (rank + 1) * count // size)


@dataclass(frozen=True)
class World:
    """One process's view of the attempt. Weights and optimizer state never depend on it."""

    rank: int  # among the processes of `group`, as is the size
    size: int
    local_rank: int  # among those of this node, as the launcher has numbered them
    device: torch.device
    backend: str  # nccl or gloo: what sends gradients
    group: dist.ProcessGroup | None = None  # for messages; None: all processes of the attempt
    store: dist.Store | None = None  # of the rendezvous, by a connection of the watchdog's own; None: a world of one
    # The processes of this node, and those with this one's place on every node. A sum is added up inside a node first,
    # so a network card carries each once. None unless there are several nodes with several processes, as many on each.
    inside: "World | None" = None
    across: "World | None" = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes console, metrics and manifest for all. (In a node's group: its own.)"""
        return self.rank == 0

    @property
    def shape(self) -> tuple[int, int]:
        """Nodes, and processes on each; (1, size) unless there are several nodes with several, as many on each."""
        return (self.across.size, self.inside.size) if self.across and self.inside else (1, self.size)

    @property
    def comm_device(self) -> torch.device:
        """The device that tensors must be on to be sent. gloo sends from CPU memory only."""
        return torch.device("cpu") if self.backend == "gloo" else self.device

    def side_group(self, limit_seconds: float) -> "World":
        """The same processes with a new gloo group, for a thread whose messages must not wait for training's."""
        if self.size == 1:
            return self
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_seconds))
        return replace(self, group=group)

    def node_group(self, identity: str, limit_seconds: float) -> "World":
        """The processes with the same `identity` as this one, with a new gloo group; ranks count within it."""
        if self.size == 1:
            return self
        identities = self.gather(identity)
        part = self
        for node in sorted(set(identities)):  # new_group is collective: every process makes every group
            ranks = [rank for rank, other in enumerate(identities) if other == node]
            group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=limit_seconds))
            if node == identity:
                part = replace(self, rank=ranks.index(self.rank), size=len(ranks), group=group)
        return part

    def gather(self, value: Any) -> list[Any]:
        """All-gather: every process's JSON value, by rank."""
        if self.size == 1:
            return [value]
        # Not torch's own all_gather_object, which pickles: whoever reaches a port of a group could run code here.
        raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        # all_gather takes equal sizes, so all learn the longest first.
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
        """Rank 0's JSON value, in every process."""
        if self.size == 1:
            return value
        content = torch.empty(0, dtype=torch.uint8)
        if self.is_main:
            content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([content.numel()])
        _broadcast(length, group=self.group, group_src=0)
        if not self.is_main:
            content = torch.empty(int(length), dtype=torch.uint8)
        _broadcast(content, group=self.group, group_src=0)
        return json.loads(content.numpy().tobytes())

    def run_on_main(self, function: Callable[[], Any]) -> Any:
        """Call `function` in rank 0 only. Every process returns its JSON value, or raises its UserError."""
        result: dict[str, Any] = {}
        # An error of any other class ends rank 0, and so all. A user's must end all with 64, and with the same text.
        if self.is_main:
            try:
                result = {"value": function()}
            except UserError as error:
                result = {"problems": error.problems}
        result = self.broadcast(result)
        if "problems" in result:
            raise UserError(*result["problems"])
        return result["value"]

    def broadcast_bytes(self, raw: memoryview | None, source: int, size: int) -> memoryview:
        """The `size` bytes `raw` of process `source`, in every process. The others pass None."""
        content = torch.empty(size, dtype=torch.uint8) if raw is None else torch.frombuffer(raw, dtype=torch.uint8)
        if self.size > 1:
            _broadcast(content, src=source, group=self.group)
        return content.numpy().data

    def take_from_main(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite each tensor with rank 0's."""
        for tensor in tensors if self.size > 1 else ():
            content = tensor.detach().to(self.comm_device).contiguous()
            _broadcast(content, group=self.group, group_src=0)
            tensor.detach().copy_(content)

    def barrier(self) -> None:
        if self.size > 1:
            _barrier(group=self.group)
