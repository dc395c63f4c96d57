"""Moves partial sums to the owners of slices, in one hop or two, and their weights to all.

With several processes on each of several nodes, a network card would carry the partial sums of each of its processes.
So a node's processes first add up what they hold among themselves, each one for the slices of all processes with its
place on other nodes; then the nodes exchange these sums. The additions are those of the same tree.

Weights that the model only reads in 16 bits travel in 16 bits. Under autocast a linear layer rounds its matrix to bf16
or fp16, and to round twice is to round once: forward and backward have the same bits. So a process holds such a matrix
rounded, but for the slice that it owns. That is why snapshots take them by slice.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from mingpt.compute.buckets import Bucket, Sliced
from mingpt.compute.tree import Subtree, add_siblings, shares, whole_subtrees
from mingpt.world.world import World, all_gather, all_to_all

GATHERS = 2  # buckets whose weights are on their way at a time: more would hide no more time, and each needs memory


@dataclass(frozen=True)
class Hop:
    """An exchange among some processes.

    Afterwards each process holds, for its slices, the sums that it sends in the next hop; after the last one the whole
    sum.
    """

    world: World
    # By rank in `world`: the subtrees whose sums that process sends.
    sent: list[list[Subtree]]


def subtrees_by_rank(nodes: int, each: int, microbatches: int) -> tuple[list[list[Subtree]], list[list[Subtree]]]:
    """The subtrees whose sums each process has after its own additions, and each node after its processes' exchange."""
    ranges = shares(nodes, each, microbatches)
    by_rank = [whole_subtrees(share.start, share.stop, 0, microbatches) for share in ranges]
    by_node = list[list[Subtree]]()
    # A node's processes have contiguous shares, so together they cover what lies between the first and the last one's.
    for first, last in zip(ranges[::each], ranges[each - 1 :: each], strict=True):
        by_node.append(whole_subtrees(first.start, last.stop, 0, microbatches))
    return by_rank, by_node


def hops(world: World, microbatches: int) -> list[Hop]:
    """The exchanges that bring partial sums to the owner of each slice, who has the whole sum after the last one."""
    by_rank, by_node = subtrees_by_rank(*world.shape, microbatches)
    if not (world.inside and world.across):
        return [Hop(world, by_rank)]
    each = world.inside.size
    first = world.across.rank * each  # of this node's ranks
    return [Hop(world.inside, by_rank[first : first + each]), Hop(world.across, by_node)]


class Exchange:
    """Sends partial sums, of a bucket or a part of each slice of it, through the hops: each process gets its slice."""

    def __init__(self, hops: Sequence[Hop], parents: Mapping[tuple[Subtree, Subtree], Subtree], parts: Tensor) -> None:
        """parts: (processes of the first hop, rows, slices for each, length); rows: this process's partial sums."""
        self.hop, *self.later = hops
        self.parents = parents
        self._send(parts)

    def _send(self, parts: Tensor) -> None:
        hop, (peers, rows, slices, length) = self.hop, parts.shape
        # Must live until they have arrived.
        self.parts = parts
        counts = [len(subtrees) for subtrees in hop.sent]
        self.received = parts.new_empty(sum(counts), slices, length)
        receive_sizes = [count * slices * length for count in counts]
        send_sizes = [rows * slices * length] * peers
        self.work = all_to_all(
            self.received.view(-1), parts.view(-1), receive_sizes, send_sizes, group=hop.world.group, async_op=True
        )

    def _sums(self) -> list[Tensor]:
        """Wait for this hop; returns (slices, length) for each subtree that it is for."""
        self.work.wait()
        received = self.received.unbind()
        # Nothing may keep what has arrived longer than its addition: a view of it once did, until the next step.
        del self.parts, self.received
        return add_siblings(dict(zip(chain.from_iterable(self.hop.sent), received, strict=True)), self.parents)

    def next_hop(self) -> None:
        """Wait for the current hop and begin the next one, if there is another."""
        if self.later:
            sums = torch.stack(self._sums(), 1)  # (slices, rows, length): a slice for each process of the next hop
            self.hop, *self.later = self.later
            self._send(sums[:, :, None])

    def result(self) -> Tensor:
        """The whole sum of this process's slice, or of the part of it that was sent."""
        (total,) = self._sums()
        return total[0]


def pack(buckets: Sequence[Bucket], names: Collection[str], autocast: Any) -> dict[Bucket, "Packing"]:
    """Make what packs the buckets with weights that travel in 16 bits.

    names: the parameters that the model reads under `autocast` alone (LanguageModel.linear_matrices).
    """
    if not isinstance(autocast, torch.autocast):  # fp32, tf32: nothing is rounded
        return {}
    packings = dict[Bucket, Packing]()
    for bucket in buckets:
        if bucket.shard and any(slot.name in names for slot in bucket.slots):
            packings[bucket] = Packing(bucket, names, autocast.fast_dtype)
    return packings


class Packing:
    """Turns a bucket's slices into messages, and back. length: of a message, in bytes.

    A message is the whole slice in 16 bits, and then the pieces of it that must not be rounded, such as biases, as they
    are. So all slices are unpacked by one copy, whatever their number, and the few such pieces by one more.
    """

    def __init__(self, bucket: Bucket, names: Collection[str], dtype: torch.dtype) -> None:
        """names: the parameters that travel as `dtype`, of 16 bits. The padding between parameters is zeros."""
        self.bucket, self.names, self.dtype = bucket, names, dtype
        # By rank: the pieces of its slice that are not rounded, and their bytes.
        self.exact = list[list[slice]]()
        self.exact_bytes = list[list[int]]()
        for start in range(0, len(bucket.weights), bucket.length):
            pieces = bucket.pieces(range(start, start + bucket.length))
            exact = [part for slot, part in pieces if slot.name not in names]
            self.exact.append(exact)
            self.exact_bytes.append([(part.stop - part.start) * 4 for part in exact])
        self.narrow_bytes = bucket.length * 2
        # An all-gather takes messages of one length: that of the process with most pieces.
        self.length = self.narrow_bytes + max(map(sum, self.exact_bytes))

    def sliced_weights(self) -> dict[str, Tensor | Sliced]:
        """The weights of which this process has no more than its slice."""
        bucket = self.bucket
        return {slot.name: bucket.tensor(bucket.local, slot) for slot in bucket.slots if slot.name in self.names}

    def pack(self, local: Tensor) -> Tensor:
        """local: this process's slice of the weights. Returns (length,) bytes."""
        message = torch.zeros(self.length, dtype=torch.uint8, device=local.device)
        message[: self.narrow_bytes].view(self.dtype).copy_(local)
        rank = self.bucket.rank
        if self.exact[rank]:
            torch._foreach_copy_(self._exact_pieces(message, rank), [local[part] for part in self.exact[rank]])
        return message

    def _exact_pieces(self, message: Tensor, rank: int) -> list[Tensor]:
        """The pieces of the message of `rank` that are not rounded."""
        end = self.narrow_bytes + sum(self.exact_bytes[rank])
        pieces = message[self.narrow_bytes : end].split(self.exact_bytes[rank])
        return [piece.view(self.bucket.weights.dtype) for piece in pieces]

    def unpack(self, messages: Tensor) -> None:
        """Write the other processes' slices into the bucket. messages: (processes, length) bytes."""
        mine = self.bucket.rank
        slices = self.bucket.weights.view(self.bucket.size, self.bucket.length)
        # Not this process's own slice: it has that in float32, and the next step updates it.
        for others in (slice(0, mine), slice(mine + 1, None)):
            slices[others].copy_(messages[others, : self.narrow_bytes].view(self.dtype))
        places, pieces = list[Tensor](), list[Tensor]()
        for rank in range(self.bucket.size):
            if rank != mine and self.exact[rank]:
                places += [slices[rank][part] for part in self.exact[rank]]
                pieces += self._exact_pieces(messages[rank], rank)
        # One operation for all: what a GPU's host has to do must not grow with the processes.
        if places:
            torch._foreach_copy_(places, pieces)


class WeightGather:
    """All-gathers each bucket's weights after every process has updated its slice.

    With several nodes, first among the processes with the same local rank, one on each node, then inside the node.
    """

    def __init__(self, world: World, in_16_bits: Mapping[Bucket, Packing]) -> None:
        """in_16_bits: how buckets with weights that travel in 16 bits are packed."""
        self.world, self.in_16_bits = world, in_16_bits
        # Between nodes first: then a card carries each slice once, and the copies for a node's processes stay inside.
        self.first = world.across or world
        self.pending = list[tuple[Bucket, Tensor, Any]]()

    def start(self, bucket: Bucket) -> None:
        """bucket: of which each process has its slice."""
        if len(self.pending) == GATHERS:
            self._complete(*self.pending.pop(0))
        packing = self.in_16_bits.get(bucket)
        local = (packing.pack(bucket.local) if packing else bucket.local).to(self.world.comm_device)
        if packing or self.first is not self.world or bucket.weights.device != local.device:
            received = local.new_empty(self.first.size * len(local))
        else:
            # In place: no second copy of the bucket. Its own slice gets the bytes that it has.
            received = bucket.weights
        self.pending.append((bucket, received, all_gather(received, local, group=self.first.group, async_op=True)))

    def finish(self) -> None:
        while self.pending:
            self._complete(*self.pending.pop(0))

    def _complete(self, bucket: Bucket, received: Tensor, work: Any) -> None:
        work.wait()
        if inside := self.world.inside:
            by_local_rank = received.new_empty(inside.size, self.first.size, len(received) // self.first.size)
            all_gather(by_local_rank.view(-1), received, group=inside.group)
            # Local rank, then node: slices lie by rank, which is the other way round.
            received = by_local_rank.transpose(0, 1).flatten()
        if packing := self.in_16_bits.get(bucket):
            packing.unpack(received.to(bucket.weights.device).view(bucket.size, -1))
        elif received is not bucket.weights:
            bucket.weights.copy_(received)
