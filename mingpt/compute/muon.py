"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): an optimizer for weight matrices.

`torch.optim.Muon` computes the same update (a test compares them), but has no way to skip a step that the device
decides on, and always multiplies in bfloat16, which many CPUs emulate slowly.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mingpt.compute.buckets import Bucket, in_memory_order
from mingpt.world.world import World, all_to_all

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: the largest slope at 0 (Jordan et al.)
ITERATIONS = 5
SMALLEST_NORM = 1e-7


def orthogonal(matrix: Tensor) -> Tensor:
    """About U Vᵀ, if the matrix is U S Vᵀ: its singular values become 0.7 to 1.2. A Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    wide = x.T if len(x) > x.shape[1] else x  # the square matrices below are the smaller ones
    wide = wide / wide.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.T if len(x) > x.shape[1] else wide).to(matrix.dtype)


class Muon:
    """Momentum, made orthogonal, with Nesterov's look ahead and decoupled weight decay.

    The update of a matrix of a rows and b columns is scaled by 0.2 √max(a, b), so that its entries are as large as
    those of AdamW's, and learning rates and weight decay carry over (Liu et al. 2025, "Muon is Scalable for LLM
    Training"). Each matrix is updated by itself, whatever the others are.

    Momentum and weights are updated by slice, as AdamW's. To be made orthogonal, each matrix goes whole to its owner.
    """

    def __init__(self, buckets: Sequence[Bucket], momentum: float, world: World) -> None:
        self.buckets, self.momentum, self.owners = buckets, momentum, Owners(buckets, cost, world)

    def step(
        self, momenta: Sequence[Tensor], gradients: Sequence[Tensor], skip: Tensor, lr: float, weight_decay: float
    ) -> None:
        """momenta, gradients: of each bucket the slice that this process owns. skip: a bool on the device.

        If it is true, weights and momentum stay as they are.
        """
        after = [old.lerp(g, 1 - self.momentum) for old, g in zip(momenta, gradients, strict=True)]
        ahead = [g.lerp(new, self.momentum) for new, g in zip(after, gradients, strict=True)]
        updates = [torch.zeros_like(flat) for flat in ahead]
        whole = self.owners.whole(ahead)
        self.owners.give_back(((k, update_of(matrix, lr)) for k, matrix in whole.items()), updates)
        for bucket, old, new, update in zip(self.buckets, momenta, after, updates, strict=True):
            weights = bucket.local
            weights.copy_(torch.where(skip, weights, weights * (1 - lr * weight_decay) + update))
            old.copy_(torch.where(skip, old, new))


class Owners:
    """Brings each tensor of the buckets whole to one process, its owner, and back in slices.

    Where no slices are, each process has all tensors, and owns them. What is computed of a whole tensor has the same
    bits whoever owns it. slots: the tensors; k is a place in this list.
    """

    def __init__(self, buckets: Sequence[Bucket], cost: Callable[[torch.Size], int], world: World) -> None:
        """cost: of what is computed of a tensor, by its shape."""
        self.buckets, self.world = buckets, world
        self.shared = any(bucket.shard for bucket in buckets)
        self.slots = [(i, slot) for i, bucket in enumerate(buckets) for slot in bucket.slots]
        size = world.size if self.shared else 1
        self.owners = owners([cost(slot.parameter.shape) for _, slot in self.slots], size)
        self.ranges = [buckets[i].ranges(slot) for i, slot in self.slots]

    @property
    def owned(self) -> list[int]:
        return [k for k, owner in enumerate(self.owners) if owner == self.world.rank or not self.shared]

    def whole(self, flats: Sequence[Tensor]) -> dict[int, Tensor]:
        """The tensors that this process owns. flats: of each bucket's layout, the slice that this process has."""
        if not self.shared:
            return {k: self.buckets[i].view(flats[i], slot) for k, (i, slot) in enumerate(self.slots)}
        pieces = [self.buckets[i].local_part(flats[i], slot) for i, slot in self.slots]
        sent = [[piece for piece, owner in zip(pieces, self.owners, strict=True) if owner == r] for r in self._ranks]
        received = self._exchange(sent, [[len(self.ranges[k][r]) for k in self.owned] for r in self._ranks])
        out = {k: torch.cat([parts[n] for parts in received]) for n, k in enumerate(self.owned)}
        shapes = {k: self.slots[k][1].parameter for k in self.owned}
        return {k: flat.as_strided(shapes[k].shape, shapes[k].stride()) for k, flat in out.items()}

    def give_back(self, whole: Iterable[tuple[int, Tensor]], flats: Sequence[Tensor]) -> None:
        """Write the tensors that each process owns into the slices that all have. whole: in the order of `owned`."""
        if not self.shared:
            for k, tensor in whole:
                i, slot = self.slots[k]
                self.buckets[i].view(flats[i], slot).copy_(tensor)
            return
        flat = {k: in_memory_order(tensor, self.slots[k][1].parameter) for k, tensor in whole}
        sent = [[t[self.ranges[k][r].start : self.ranges[k][r].stop] for k, t in flat.items()] for r in self._ranks]
        lengths = [len(by_rank[self.world.rank]) for by_rank in self.ranges]
        sizes = [[n for n, owner in zip(lengths, self.owners, strict=True) if owner == r] for r in self._ranks]
        received = [iter(parts) for parts in self._exchange(sent, sizes)]
        for (i, slot), owner in zip(self.slots, self.owners, strict=True):
            self.buckets[i].local_part(flats[i], slot).copy_(next(received[owner]))

    @property
    def _ranks(self) -> range:
        return range(self.world.size)

    def _exchange(self, sent: list[list[Tensor]], sizes: list[list[int]]) -> list[list[Tensor]]:
        """Send each process its tensors. sizes: of what comes from each one."""
        nothing = self.buckets[0].weights[:0]  # a process may own no tensor, and no piece of one
        flat = torch.cat([nothing, *(tensor for tensors in sent for tensor in tensors)])
        device = self.world.comm_device
        received = torch.empty(sum(map(sum, sizes)), dtype=flat.dtype, device=device)
        all_to_all(received, flat.to(device), [sum(s) for s in sizes], [sum(map(len, tensors)) for tensors in sent])
        parts = received.to(flat.device).split([sum(s) for s in sizes])
        return [list(part.split(s)) for part, s in zip(parts, sizes, strict=True)]


def update_of(matrix: Tensor, lr: float) -> Tensor:
    return orthogonal(matrix) * (-lr * 0.2 * math.sqrt(max(matrix.shape)))


def cost(shape: torch.Size) -> int:
    """The multiplications that it takes to make a matrix orthogonal, up to a factor."""
    return shape.numel() * min(shape)


def owners(costs: Sequence[int], size: int) -> list[int]:
    """Which of `size` processes gets each matrix: the most expensive first, to whoever has least to do.

    Graham 1969: the busiest one then has at most 4/3 of what it must have.
    """
    out, load = [0] * len(costs), [0] * size
    for k in sorted(range(len(costs)), key=lambda k: (-costs[k], k)):
        out[k] = load.index(min(load))
        load[out[k]] += costs[k]
    return out
