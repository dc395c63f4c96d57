"""Copy this process's share of the state at a step's boundary, so that training can go on while it is written."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, zip_longest

import torch
from torch import Tensor

from mingpt.compute.buckets import Sliced
from mingpt.console import say
from mingpt.snapshot.format import Part, SharedState, lay_out
from mingpt.world.world import World, all_to_all

ALIGNED = 64  # bytes; for all dtypes
WINDOW = 8 * 2**20  # bytes of a part that are exchanged at a time
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

    def __init__(self, world: World, everyone: World | None = None, writers: Sequence[int] | None = None) -> None:
        """world: who writes one snapshot together. everyone: all who have slices, with a group for the writer's thread.

        writers: the ranks of `world` that write parts; None: all. Collective.
        """
        self.world, self.everyone = world, everyone or world
        writers = range(world.size) if writers is None else writers
        share = [writers.index(world.rank), len(writers)] if world.rank in writers else None
        self._shares: list[list[int] | None] = self.everyone.gather(share)
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
        shares = [parts[share[0] :: share[1]] if share else [] for share in self._shares]
        mine = [name for part in shares[self.everyone.rank] for name in part.names]
        found = {name: tensor for name in mine if isinstance(tensor := everything[name], Tensor)}
        found |= {name: tensor.local for name, tensor in sliced.items()}
        if new := {name: tensor for name, tensor in found.items() if name not in self._buffers}:
            # With the first snapshot: shapes stay as they are.
            block = in_one_block(new, any(tensor.is_cuda for tensor in new.values()))
            self._buffers |= {name: flat.view(new[name].shape) for name, flat in block.items()}
        if self._stream is None and any(t.is_cuda for t in found.values()):
            self._stream = torch.cuda.Stream()
        if (stream := self._stream) is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # None: the current stream
            copies = {n: self._buffers[n].copy_(tensor.detach(), non_blocking=True) for n, tensor in found.items()}
        if stream is not None:
            self._copied = torch.cuda.Event(blocking=True)  # the writer's thread sleeps while it waits
            self._copied.record(stream)
        return Staged(shares, copies, sliced)

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
        sliced, everyone = staged.sliced, self.everyone
        tensors = [{n: sliced[n] for part in parts for n in part.names if n in sliced} for parts in wanted]
        whole = in_one_block(tensors[everyone.rank])
        for windows in zip_longest(*map(cut, tensors), fillvalue=[]):
            # By rank, what it is sent, and where that goes which comes from it.
            mine = {n: sliced[n].ranges[everyone.rank] for to in windows for n, _ in to}
            sent = [[staged.tensors[n][within(mine[n], window, mine[n].start)] for n, window in to] for to in windows]
            received = [
                [whole[n][within(sliced[n].ranges[rank], window)] for n, window in windows[everyone.rank]]
                for rank in range(everyone.size)
            ]
            sizes = [[sum(piece.nbytes for piece in pieces) for pieces in of] for of in (received, sent)]
            message = torch.empty(sum(sizes[0]), dtype=torch.uint8)
            pieces = [[piece.view(torch.uint8) for pieces in of for piece in pieces] for of in (received, sent)]
            all_to_all(message, torch.cat([message[:0], *pieces[1]]), *sizes, group=everyone.group)
            for piece, content in zip(pieces[0], message.split([*map(len, pieces[0])]), strict=True):
                piece.copy_(content)
        return {n: flat.as_strided(sliced[n].shape, sliced[n].stride) for n, flat in whole.items()}

    def hold_update(self) -> None:
        """Make the current CUDA stream wait for the copies before it changes the state. Does not block the host."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Block until the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()


def cut(tensors: Mapping[str, Sliced]) -> list[list[tuple[str, range]]]:
    """Windows of the tensors' elements, in groups of at most WINDOW bytes."""
    groups, room = list[list[tuple[str, range]]](), 0
    for name, tensor in tensors.items():
        count, size = tensor.shape.numel(), tensor.dtype.itemsize
        for first in range(0, count, WINDOW // size):
            window = range(first, min(first + WINDOW // size, count))
            if len(window) * size > room:
                groups.append([])
                room = WINDOW
            groups[-1].append((name, window))
            room -= len(window) * size
    return groups


def within(held: range, window: range, start: int = 0) -> slice:
    """The elements that lie in both ranges, counted from `start`."""
    first = max(held.start, window.start)
    return slice(first - start, max(first, min(held.stop, window.stop)) - start)


def in_one_block(wanted: Mapping[str, Tensor | Sliced], pinned: bool = False) -> dict[str, Tensor]:
    """Memory for each tensor, flat, all in one block: malloc would keep much of many small ones."""
    starts = [0, *accumulate(-(-t.nbytes // ALIGNED) * ALIGNED for t in wanted.values())]
    block = block_of(starts[-1], pinned)
    return {n: block[i : i + t.nbytes].view(t.dtype) for i, (n, t) in zip(starts, wanted.items(), strict=False)}


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


def trim_memory(staged: Staged) -> None:
    """Return what malloc keeps and nobody uses: as much as a step takes, beside the parts. (glibc alone can.)

    Only where parts are put together from slices: the next step takes 5 % longer, since its memory is mapped again.
    """
    if staged.sliced:
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
