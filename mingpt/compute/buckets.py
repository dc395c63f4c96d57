"""Parameters side by side in a few flat tensors, of which each process owns an equal slice.

The layout is a function of the model and of what trains it (optimizer.name, train.freeze): which parameters share a
bucket, where each one starts, and where a bucket's chunks lie. The world decides only how many chunks a process owns.
So what is computed by element (AdamW) or by chunk (the gradient's norm) has the same bits, whoever computes it. ZeRO
(Rajbhandari et al. 2020) calls such slices shards.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mingpt.world.world import World

Named = tuple[str, nn.Parameter]  # a parameter

# Elements. A parameter starts at a multiple of START: vector instructions then cover all of it, whatever the slice, and
# a rest that a scalar loop would compute with other bits does not exist. (Tried with fused AdamW: 50 random cuts of
# 100,003 elements gave other bits, 50 at multiples of 64 the same.)
START = 64
# Elements whose squares are summed on their own for the gradient's norm. A slice has whole chunks, so no sum is cut.
CHUNK = 4096
BUCKET_BYTES = 25 * 2**20  # as in DDP: large enough for a network, small enough to begin during backward


def exchange_count(nbytes: int) -> int:
    """In how many exchanges, of about BUCKET_BYTES each, so large a bucket is sent."""
    return max(1, round(nbytes / BUCKET_BYTES))


@dataclass(frozen=True)
class Sliced:
    """A tensor of which each process has a part."""

    shape: torch.Size
    # A tensor may lie in memory in another order than its elements (channels_last, transposed); it has no gaps.
    stride: tuple[int, ...]
    dtype: torch.dtype
    # By rank: the indices of that process's elements, in the order of the tensor's memory.
    ranges: tuple[range, ...]
    # This process's elements, flat.
    local: Tensor

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket."""

    name: str
    parameter: nn.Parameter
    # In elements; the end with the padding up to the next START.
    start: int
    end: int


class Bucket:
    """Parameters in one flat tensor, of which each process has an equal slice."""

    def __init__(self, named: list[Named], world: World, shard: bool) -> None:
        self.rank, self.size = world.rank, world.size
        # Whether each process updates its own slice; otherwise each one updates all.
        self.shard = shard and world.size > 1
        self.slots, end = list[Slot](), 0
        for name, p in named:
            start = end
            end = start + -(-p.numel() // START) * START
            self.slots.append(Slot(name, p, start, end))
        # How many hold parameters. What follows is padding, zeros: the slices are equal, as an all-gather wants them.
        self.chunks = -(-end // CHUNK)
        # Of each process's slice, in elements.
        self.length = -(-self.chunks // world.size) * CHUNK
        first = named[0][1]
        # (size * length,). The parameters become views of it, so gathering it updates the model.
        self.weights = torch.zeros(world.size * self.length, dtype=first.dtype, device=first.device)
        for slot in self.slots:
            view = self.view(self.weights, slot)
            view.copy_(slot.parameter.detach())
            slot.parameter.data = view
        # Where no parameter lies. Norms are taken of whole chunks: each tensor of this layout has zeros there.
        self.gaps = list[slice]()
        next_starts = [slot.start for slot in self.slots[1:]] + [len(self.weights)]
        for slot, next_start in zip(self.slots, next_starts, strict=True):
            gap = slice(slot.start + slot.parameter.numel(), next_start)
            if gap.start < gap.stop:
                self.gaps.append(gap)
        # What this process updates, in elements.
        self.owned = range(len(self.weights))
        if self.shard:
            self.owned = range(self.rank * self.length, (self.rank + 1) * self.length)

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        """The parameter's part of a tensor with this bucket's layout, in its shape."""
        p = slot.parameter
        return flat.as_strided(p.shape, p.stride(), flat.storage_offset() + slot.start)

    def views(self, flat: Tensor, slots: Sequence[Slot] | None) -> list[Tensor]:
        """The parts of some parameters of a tensor with this bucket's layout; None: the tensor itself."""
        return [flat] if slots is None else [self.view(flat, slot) for slot in slots]

    def empty(self) -> Tensor:
        """A tensor of this layout to be written to: zeros in the gaps, anything elsewhere."""
        flat = torch.empty_like(self.weights)
        if self.gaps:
            torch._foreach_zero_([flat[gap] for gap in self.gaps])
        return flat

    @property
    def local(self) -> Tensor:
        """This process's slice of the weights."""
        return self.weights[self.owned.start : self.owned.stop]

    def pieces(self, owned: range) -> Iterator[tuple[Slot, slice]]:
        """Each parameter that has a part in the slice `owned`, and where in the slice that is, with its padding."""
        for slot in self.slots:
            first, end = max(slot.start, owned.start), min(slot.end, owned.stop)
            if first < end:
                yield slot, slice(first - owned.start, end - owned.start)

    def ranges(self, slot: Slot) -> tuple[range, ...]:
        """The indices of the parameter's elements in each process's slice, by rank."""
        count = slot.parameter.numel()
        ranges = list[range]()
        for rank in range(self.size):
            first = rank * self.length - slot.start
            ranges.append(range(min(max(first, 0), count), min(max(first + self.length, 0), count)))
        return tuple(ranges)

    def local_part(self, flat: Tensor, slot: Slot) -> Tensor:
        """The parameter's elements in `flat`, which is the slice `owned` of this bucket's layout."""
        elements = self.ranges(slot)[self.rank]
        offset = slot.start - self.owned.start
        return flat[offset + elements.start : offset + elements.stop] if elements else flat[:0]

    def tensor(self, flat: Tensor, slot: Slot) -> "Tensor | Sliced":
        """The parameter's part of `flat`, which is the slice `owned`, as a snapshot stores it."""
        if not self.shard:
            return self.view(flat, slot)
        p = slot.parameter
        return Sliced(p.shape, p.stride(), p.dtype, self.ranges(slot), self.local_part(flat, slot))

    def load(self, flat: Tensor, slot: Slot, value: Tensor) -> None:
        """Copy this process's elements of the whole tensor `value` into `flat`, which is the slice `owned`."""
        if self.shard:
            elements = self.ranges(slot)[self.rank]
            self.local_part(flat, slot).copy_(in_memory_order(value, slot.parameter)[elements.start : elements.stop])
        else:
            self.view(flat, slot).copy_(value)


def in_memory_order(value: Tensor, like: Tensor) -> Tensor:
    """The elements of `value`, flat, in the order in which `like`, which has no gaps, lies in memory."""
    if like.is_contiguous():
        return value.reshape(-1)
    return torch.empty_like(like).copy_(value).as_strided((like.numel(),), (1,))


def make_buckets(
    named: Iterable[Named], of_muon: set[str], world: World, shard: bool, most: int = BUCKET_BYTES
) -> list[Bucket]:
    """Buckets of at most `most` bytes, or of one parameter. named: in the model's order.

    In reverse order, since backward computes the last layer's gradients first. A bucket has one dtype, and parameters
    of one optimizer. shard: each process updates its own slice; otherwise each one updates all.
    """
    groups = list[list[Named]]()
    # By dtype and optimizer: the group that still has room. Nothing here depends on the world, so neither do the bits.
    open_groups = dict[object, list[Named]]()
    for name, p in reversed(list(named)):
        kind = p.dtype, name in of_muon
        group = open_groups.get(kind)
        if group is None or sum(q.nbytes for _, q in group) + p.nbytes > most:
            group = open_groups[kind] = []
            groups.append(group)
        group.append((name, p))
    return [Bucket(group, world, shard) for group in groups]
