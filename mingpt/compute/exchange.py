"""Moves partial sums to the owners of slices, in one hop or two, and their weights to all.

With several processes on each of several nodes, a network card would carry the partial sums of each of its processes.
So a node's processes first add up what they hold among themselves, each one for the slices of all processes with its
place on other nodes; then the nodes exchange these sums. The additions are those of the same tree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mingpt.compute.buckets import Bucket
from mingpt.compute.narrow import Packing
from mingpt.compute.tree import Node, add_siblings, whole_nodes
from mingpt.world.world import World, all_gather, all_to_all, share

IN_FLIGHT = 2  # buckets whose weights are on their way: more would hide no more time, and each needs memory


@dataclass(frozen=True)
class Hop:
    """An exchange among the processes of `world`. held: the nodes of the tree that each one sends, by rank in `world`.

    wanted: the nodes that each one adds them up to.
    """

    world: World
    held: list[list[Node]]
    wanted: list[Node]


def held(size: int, microbatches: int) -> list[list[Node]]:
    """The nodes of the tree that each of `size` processes, or nodes of machines, has the sums of, by rank."""
    shares = (share(r, size, microbatches) for r in range(size))
    return [whole_nodes(s.start, s.stop, 0, microbatches) for s in shares]


def hops(world: World, microbatches: int) -> list[Hop]:
    """The way of partial sums. A slice's owner has the whole sum after the last hop."""
    own, root = held(world.size, microbatches), (0, microbatches)
    if world.inside is None or world.across is None:
        return [Hop(world, own, [root])]
    each, here, of_machines = world.inside.size, world.across.rank, held(world.across.size, microbatches)
    return [
        Hop(world.inside, own[here * each : (here + 1) * each], of_machines[here]),
        Hop(world.across, of_machines, [root]),
    ]


class Flight:
    """One bucket's partial sums on their way."""

    def __init__(self, hops: Sequence[Hop], parents: Mapping[tuple[Node, Node], Node], parts: Tensor) -> None:
        """parts: (processes of the first hop, rows, slices for each, length); rows: what this process holds."""
        self.hop, *self.to_come = hops
        self.parents = parents
        self._send(parts)

    def _send(self, parts: Tensor) -> None:
        hop, (peers, rows, slices, length) = self.hop, parts.shape
        self.sent = parts  # must live until it has arrived
        counts = [len(nodes) for nodes in hop.held]
        self.received = parts.new_empty(sum(counts), slices, length)
        sizes = [count * slices * length for count in counts], [rows * slices * length] * peers
        self.work = all_to_all(
            self.received.view(-1), parts.view(-1), *sizes, group=hop.world.group, async_op=True
        )  # fmt: skip

    def _added(self) -> list[Tensor]:
        """(slices, length) for each node that this hop's processes want."""
        self.work.wait()
        nodes = (node for nodes in self.hop.held for node in nodes)
        return add_siblings(dict(zip(nodes, self.received.unbind(), strict=True)), self.parents)

    def go_on(self) -> None:
        """If there is another hop: wait for the one under way, and begin it."""
        if self.to_come:
            sums = torch.stack(self._added(), 1)  # (slices, rows, length): a slice for each process of the next hop
            self.hop, *self.to_come = self.to_come
            self._send(sums[:, :, None])

    def land(self) -> Tensor:
        """This process's slice of the whole sum."""
        (total,) = self._added()
        return total[0]


class Gathering:
    """Each process has updated its slice of a bucket's weights: every process gets all of them.

    Over several nodes, too, first from the processes with this one's place on other nodes, then inside the node.
    """

    def __init__(self, world: World, packings: Mapping[Bucket, Packing]) -> None:
        """packings: of the buckets with weights that travel in 16 bits."""
        self.world, self.first, self.packings = world, world.across or world, packings
        self.pending = list[tuple[Bucket, Tensor, Any]]()

    def start(self, bucket: Bucket) -> None:
        if not bucket.shard:
            return
        if len(self.pending) == IN_FLIGHT:
            self._land(*self.pending.pop(0))
        packing = self.packings.get(bucket)
        mine = (packing.pack(bucket.mine) if packing else bucket.mine).to(self.world.comm_device)
        if packing or self.first is not self.world or bucket.weights.device != mine.device:
            found = mine.new_empty(self.first.size * len(mine))
        else:
            found, mine = bucket.weights, mine.clone()
        self.pending.append((bucket, found, all_gather(found, mine, group=self.first.group, async_op=True)))

    def finish(self) -> None:
        while self.pending:
            self._land(*self.pending.pop(0))

    def _land(self, bucket: Bucket, found: Tensor, work: Any) -> None:
        work.wait()
        if inside := self.world.inside:
            by_place = found.new_empty(inside.size, self.first.size, len(found) // self.first.size)
            all_gather(by_place.view(-1), found, group=inside.group)
            found = by_place.transpose(0, 1).flatten()
        if packing := self.packings.get(bucket):
            packing.unpack(found.to(bucket.weights.device).view(bucket.size, -1))
        elif found is not bucket.weights:
            bucket.weights.copy_(found)
