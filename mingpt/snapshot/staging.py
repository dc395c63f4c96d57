"""Copy this process's share of the state at a step's boundary, so that training can go on while it is written."""

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from mingpt.cli.console import say
from mingpt.compute.buckets import Sliced
from mingpt.snapshot.format import Part, SharedState, lay_out
from mingpt.world.world import World, all_to_all

Tensors = dict[str, Tensor]  # by name

ALIGNED = 64  # bytes; for all dtypes
# Bytes of a part that are exchanged at a time. Whole parts took 192 MiB beside those that wait to be written.
WINDOW = 8 * 2**20
StagedPart = tuple[Part, Tensors]  # a part and its tensors, in CPU memory


@dataclass(frozen=True)
class Staged:
    """A step's state in CPU memory."""

    parts: list[list[Part]]  # which ones each process writes, by rank
    # Of this process, by name: of the parts that it writes, the tensors that it has whole; and of every sliced tensor
    # its slice, flat.
    tensors: Tensors
    sliced: dict[str, Sliced]


class Staging:
    """CPU buffers that are kept from one snapshot to the next: page faults of new memory cost more than the copy."""

    def __init__(self, world: World, everyone: World | None, writers: Sequence[int]) -> None:
        """world: who writes one snapshot together. everyone: all who have slices, with a group for the writer's thread;
        None: the same. writers: the ranks of `world` that write parts. Collective.
        """
        self.everyone = everyone or world
        # Each node writes a hot snapshot of its own: which of how many writers a process is differs between them.
        share = [writers.index(world.rank), len(writers)] if world.rank in writers else None
        self._shares: list[list[int] | None] = self.everyone.gather(share)
        self._buffers: Tensors = {}
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    def copy_share(self, state: SharedState) -> Staged:
        """Start copying what this process writes or owns. On CUDA the copies may still be under way at the return."""
        twice = state["model"].keys() & state["optimizer"].keys()
        if twice:
            raise ValueError(f"both kinds of state have a tensor named {', '.join(sorted(twice))}")
        everything = {**state["model"], **state["optimizer"]}
        sliced = {name: tensor for name, tensor in everything.items() if isinstance(tensor, Sliced)}
        parts = lay_out(state)
        # In turn, since the weights come first and then the moments: in blocks, rank 0 would copy all whole tensors.
        shares = [parts[share[0] :: share[1]] if share else [] for share in self._shares]
        local = {name: tensor.local for name, tensor in sliced.items()}
        for part in shares[self.everyone.rank]:
            for name in part.names:
                tensor = everything[name]
                if isinstance(tensor, Tensor):
                    local[name] = tensor
        copies = self._copy(local)
        return Staged(shares, copies, sliced)

    def _copy(self, local: Mapping[str, Tensor]) -> Tensors:
        on_gpu = any(tensor.is_cuda for tensor in local.values())
        # With the first snapshot. Shapes stay; new names come only where an optimizer adds to its state.
        if new := {name: tensor for name, tensor in local.items() if name not in self._buffers}:
            for name, flat in in_one_block(new, on_gpu).items():
                self._buffers[name] = flat.view(new[name].shape)
        if self._stream is None and on_gpu:
            self._stream = torch.cuda.Stream()
        stream = self._stream
        if stream is not None:
            # A stream of its own lets the next forward pass run while this copies. It must not begin before the update
            # that the device may still compute.
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # None: the current stream
            copies = {name: self._buffers[name].copy_(t.detach(), non_blocking=True) for name, t in local.items()}
        if stream is not None:
            self._copied = torch.cuda.Event(blocking=True)  # the writer's thread sleeps while it waits
            self._copied.record(stream)
        return copies

    def parts(self, staged: Staged) -> Iterator[StagedPart]:
        """This process's parts, one after the other. With sliced tensors, each step is a collective of all processes.

        So whoever begins must go on to the end.
        """
        rank = self.everyone.rank
        for i in range(max(map(len, staged.parts))):
            turn = [parts[i] if i < len(parts) else None for parts in staged.parts]  # the next of each process
            whole = self._collect(staged, turn) if staged.sliced else {}
            if (part := turn[rank]) is not None:
                yield part, {name: whole[name] if name in whole else staged.tensors[name] for name in part.names}

    def _collect(self, staged: Staged, turn: Sequence[Part | None]) -> Tensors:
        """The sliced tensors of this process's next part, whole. turn: the next part of each process, by rank."""
        rank, sliced = self.everyone.rank, staged.sliced
        wanted = list[dict[str, Sliced]]()  # by rank: the tensors that it puts together
        for part in turn:
            names = part.names if part else ()
            wanted.append({name: sliced[name] for name in names if name in sliced})
        whole = in_one_block(wanted[rank])
        for windows in zip_longest(*map(cut, wanted), fillvalue=[]):
            # Two lists, each by rank: what of its tensors is here, and what of this process's tensors it has.
            sent, received = list[Tensor](), list[Tensor]()
            sends, receives = [0] * len(windows), [0] * len(windows)  # in bytes
            for other, to in enumerate(windows):
                for name, window in to:
                    own = sliced[name].ranges[rank]
                    sent.append(staged.tensors[name][within(own, window, own.start)].view(torch.uint8))
                    sends[other] += len(sent[-1])
                for name, window in windows[rank]:
                    received.append(whole[name][within(sliced[name].ranges[other], window)].view(torch.uint8))
                    receives[other] += len(received[-1])
            message = torch.empty(sum(receives), dtype=torch.uint8)
            # The empty piece: cat refuses an empty list, and a process may have nothing to send in this window.
            all_to_all(message, torch.cat([message[:0], *sent]), receives, sends, group=self.everyone.group)
            for piece, content in zip(received, message.split([*map(len, received)]), strict=True):
                piece.copy_(content)
        # A tensor's elements lie in its slices as in memory, which need not be in rows (channels_last).
        return {name: flat.as_strided(sliced[name].shape, sliced[name].stride) for name, flat in whole.items()}

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


def in_one_block(wanted: Mapping[str, Tensor | Sliced], pinned: bool = False) -> Tensors:
    """Memory for each tensor, flat, all in one block: malloc would keep much of many small ones."""
    starts, end = dict[str, int](), 0
    for name, tensor in wanted.items():
        starts[name] = end
        end += -(-tensor.nbytes // ALIGNED) * ALIGNED  # rounded up: torch refuses to view bytes that are not aligned
    block = block_of(end, pinned)
    return {name: block[starts[name] :][: t.nbytes].view(t.dtype) for name, t in wanted.items()}


def block_of(size: int, pinned: bool) -> Tensor:
    """Bytes in CPU memory. pinned: locked until the end, so that a device copies into them while the host goes on."""
    block = torch.empty(size, dtype=torch.uint8)
    # Not by torch's pin_memory, which rounds each tensor up to a power of two: 5.0 GB for the 3.0 GB of GPT-2's two
    # tiers.
    if pinned and (error := int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), size, 0))):
        say(f"snapshots: {size} bytes could not be pinned (CUDA's error {error}): training waits while they are copied")
        # CUDA keeps the error, and torch would raise it at its next kernel, in the middle of a step.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return block


def trim_memory(staged: Staged) -> None:
    """Return what malloc keeps and nobody uses: as much as a step takes, beside the parts. (glibc alone can.)"""
    # Measured at 30M, two processes: of 1,030 MiB between steps, 290 were free in malloc's arenas. The next step takes
    # 5 % longer, since its memory is mapped again: not where there are no slices, with little to gain.
    if staged.sliced:
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
