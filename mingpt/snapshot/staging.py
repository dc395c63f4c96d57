"""Copy this process's share of the state at a step's boundary, so that training can go on while it is written."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mingpt.compute.buckets import Sliced
from mingpt.console import say
from mingpt.snapshot.format import Part, SharedState, lay_out
from mingpt.world.world import World, all_to_all, share

ALIGNED = 64  # bytes; for all dtypes
StagedPart = tuple[Part, dict[str, Tensor]]  # a part and its tensors, in CPU memory


@dataclass(frozen=True)
class Staged:
    """A step's state in CPU memory. parts: which ones each process writes, by rank.

    tensors: this process's, by name: of its own parts; and of every sliced tensor its slice, flat.
    """

    parts: list[list[Part]]
    tensors: dict[str, Tensor]
    sliced: dict[str, Sliced]


class Staging:
    """CPU buffers that are kept from one snapshot to the next: page faults of new memory cost more than the copy."""

    def __init__(self, world: World, everyone: World | None = None) -> None:
        """world: who writes one snapshot together. everyone: all who have slices, with a group for the writer's thread.

        Collective.
        """
        self.world, self.everyone = world, everyone or world
        self._writers: list[list[int]] = self.everyone.gather([world.rank, world.size])
        self._buffers: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def copy_share(self, state: SharedState) -> Staged:
        """Start copying what this process writes or owns. On CUDA the copies may still be under way at the return."""
        twice = state["model"].keys() & state["optimizer"].keys()
        if twice:
            raise ValueError(f"both kinds of state have a tensor named {', '.join(sorted(twice))}")
        parts = lay_out(state)
        everything = {name: tensor for tensors in state.values() for name, tensor in tensors.items()}
        sliced = {name: tensor for name, tensor in everything.items() if isinstance(tensor, Sliced)}
        mine = [name for i in self.world.share(len(parts)) for name in parts[i].names]
        found = {name: tensor for name in mine if isinstance(tensor := everything[name], Tensor)}
        found |= {name: tensor.local for name, tensor in sliced.items()}
        if new := {name: tensor for name, tensor in found.items() if name not in self._buffers}:
            self._make_buffers(new)  # with the first snapshot: shapes stay as they are
        if self._stream is None and any(t.is_cuda for t in found.values()):
            self._stream = torch.cuda.Stream()
        if (stream := self._stream) is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # None: the current stream
            copies = {n: self._buffers[n].copy_(tensor.detach(), non_blocking=True) for n, tensor in found.items()}
        if stream is not None:
            self._copied = torch.cuda.Event(blocking=True)  # the writer's thread sleeps while it waits
            self._copied.record(stream)
        return Staged(
            [[parts[i] for i in share(rank, size, len(parts))] for rank, size in self._writers], copies, sliced
        )

    def parts(self, staged: Staged) -> Iterator[StagedPart]:
        """This process's parts, one after the other. With sliced tensors, each step is a collective of all processes.

        So whoever begins must go on to the end.
        """
        own = staged.parts[self.everyone.rank]
        for i in range(max(map(len, staged.parts))):
            whole = self._collect(staged, [parts[i : i + 1] for parts in staged.parts]) if staged.sliced else {}
            for part in own[i : i + 1]:
                yield part, {name: whole[name] if name in whole else staged.tensors[name] for name in part.names}

    def _collect(self, staged: Staged, wanted: list[list[Part]]) -> dict[str, Tensor]:
        """The sliced tensors of this process's next part, whole. wanted: the next part of each process, by rank."""
        names = [[n for part in parts for n in part.names if n in staged.sliced] for parts in wanted]
        mine = {n: staged.sliced[n] for n in names[self.everyone.rank]}
        sent = [staged.tensors[n].view(torch.uint8) for to in names for n in to]
        sizes = [[len(t.ranges[rank]) * t.dtype.itemsize for t in mine.values()] for rank in range(self.everyone.size)]
        received = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8)
        all_to_all(
            received,
            torch.cat(sent) if sent else received.new_empty(0),
            [sum(from_one) for from_one in sizes],
            [sum(staged.tensors[n].nbytes for n in to) for to in names],
            group=self.everyone.group,
        )
        pieces = [part.split(s) for part, s in zip(received.split([sum(s) for s in sizes]), sizes, strict=True)]
        whole = {
            n: torch.cat([by_rank[k] for by_rank in pieces]).view(t.dtype) for k, (n, t) in enumerate(mine.items())
        }
        return {n: flat.as_strided(mine[n].shape, mine[n].stride) for n, flat in whole.items()}

    def _make_buffers(self, found: dict[str, Tensor]) -> None:
        """One for each tensor, all in one block."""
        starts = [0, *accumulate(-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in found.values())]
        block = block_of(starts[-1], any(tensor.is_cuda for tensor in found.values()))
        for start, (name, tensor) in zip(starts, found.items(), strict=False):
            self._buffers[name] = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def hold_update(self) -> None:
        """Make the current CUDA stream wait for the copies before it changes the state. Does not block the host."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Block until the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()


def block_of(size: int, pinned: bool) -> Tensor:
    """Bytes in CPU memory. pinned: locked until the end, so that a device copies into them while the host goes on.

    One block, and not by torch's pin_memory, which rounds each up to a power of two: 5.0 GB for the 3.0 GB of GPT-2's
    two tiers.
    """
    block = torch.empty(size, dtype=torch.uint8)
    if pinned and (error := int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), size, 0))):
        say(f"snapshots: {size} bytes could not be pinned (CUDA's error {error}): training waits while they are copied")
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")  # takes the error, which torch would raise at its next kernel
    return block
