"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): an optimizer for weight matrices.

`torch.optim.Muon` computes the same update (a test compares them), but has no way to skip a step that the device
decides on, and always multiplies in bfloat16, which many CPUs emulate slowly.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from mingpt.compute.buckets import Bucket, Slot, in_memory_order
from mingpt.compute.rules import Rule
from mingpt.world.world import World, all_to_all

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: the largest slope at 0 (Jordan et al.)
ITERATIONS = 5
SMALLEST_NORM = 1e-7


def orthogonal(matrix: Tensor) -> Tensor:
    """About U Vᵀ, if the matrix is U S Vᵀ: its singular values become 0.7 to 1.2. A Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    # GPUs multiply fastest in bfloat16, and the iteration needs no more. Many CPUs only emulate it.
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    # The square matrices below are the smaller ones of both.
    wide = x.T if len(x) > x.shape[1] else x
    # Singular values of at most 1, or the iteration would not converge. A gradient of zeros stays zeros.
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

    def __init__(self, buckets: Sequence[Bucket], rule: Rule, momentum: float, world: World) -> None:
        """buckets: of matrices alone. rule: of all of them."""
        self.buckets, self.rule, self.momentum = buckets, rule, momentum
        self.owners = Owners(buckets, cost, world)

    def step(self, momenta: Sequence[Tensor], gradients: Sequence[Tensor], skip: Tensor, factor: float) -> None:
        """momenta, gradients: of each bucket the slice that this process owns. factor: of the rule's rate.

        skip: a bool on the device. If it is true, weights and momentum stay as they are.
        """
        lr = self.rule.lr * factor
        new_momenta, ahead = list[Tensor](), list[Tensor]()
        for old, gradient in zip(momenta, gradients, strict=True):
            # Not in place: whether the step is skipped only the device knows.
            new = old.lerp(gradient, 1 - self.momentum)
            new_momenta.append(new)
            # Nesterov: where the momentum would be after this gradient once more.
            ahead.append(gradient.lerp(new, self.momentum))
        updates = [torch.zeros_like(flat) for flat in ahead]
        self.owners.scatter_owned(_updates(self.owners.gather_owned(ahead), lr), updates)
        for bucket, old, new, update in zip(self.buckets, momenta, new_momenta, updates, strict=True):
            weights = bucket.local
            decayed = weights * (1 - lr * self.rule.weight_decay)
            weights.copy_(torch.where(skip, weights, decayed + update))
            old.copy_(torch.where(skip, old, new))


def _updates(matrices: Mapping[int, Tensor], lr: float) -> Iterator[tuple[int, Tensor]]:
    # One after the other: where no slices are, all of them at once would be another copy of the weights.
    for k, matrix in matrices.items():
        yield k, orthogonal(matrix) * (-lr * 0.2 * math.sqrt(max(matrix.shape)))


class Owners:
    """Brings each tensor of the buckets whole to one process, its owner, and back in slices.

    Where no slices are, each process has all tensors, and owns them. What is computed of a whole tensor has the same
    bits whoever owns it.
    """

    def __init__(self, buckets: Sequence[Bucket], cost: Callable[[torch.Size], int], world: World) -> None:
        """cost: of what is computed of a tensor, by its shape."""
        self.buckets, self.world = buckets, world
        self.shared = any(bucket.shard for bucket in buckets)
        # The tensors, each with its bucket's index. In the methods below, k is a place in this list.
        self.slots = list[tuple[int, Slot]]()
        # By tensor and rank: which of its elements that process has in its slice.
        self.ranges = list[tuple[range, ...]]()
        costs = list[int]()
        for i, bucket in enumerate(buckets):
            for slot in bucket.slots:
                self.slots.append((i, slot))
                self.ranges.append(bucket.ranges(slot))
                costs.append(cost(slot.parameter.shape))
        # Known to all without a message, since it follows from the shapes: no process asks who owns what.
        self.owners = owners(costs, world.size if self.shared else 1)

    @property
    def owned(self) -> list[int]:
        return [k for k, owner in enumerate(self.owners) if owner == self.world.rank or not self.shared]

    def gather_owned(self, flats: Sequence[Tensor]) -> dict[int, Tensor]:
        """The tensors that this process owns. flats: of each bucket's layout, the slice that this process has."""
        whole = dict[int, Tensor]()
        if not self.shared:
            for k, (i, slot) in enumerate(self.slots):
                whole[k] = self.buckets[i].view(flats[i], slot)
            return whole
        # By rank: what that process gets, which is this one's piece of each tensor that it owns.
        sends = self._empty()
        for (i, slot), owner in zip(self.slots, self.owners, strict=True):
            sends[owner].append(self.buckets[i].local_part(flats[i], slot))
        sizes = [[len(self.ranges[k][rank]) for k in self.owned] for rank in range(self.world.size)]
        pieces_by_rank = self._exchange(sends, sizes)
        for n, k in enumerate(self.owned):
            parameter = self.slots[k][1].parameter
            # Slices go up with the ranks, so the pieces in their order are the tensor as it lies in memory.
            flat = torch.cat([pieces[n] for pieces in pieces_by_rank])
            whole[k] = flat.as_strided(parameter.shape, parameter.stride())
        return whole

    def scatter_owned(self, whole: Iterable[tuple[int, Tensor]], flats: Sequence[Tensor]) -> None:
        """Write the tensors that each process owns into the slices that all have. whole: in the order of `owned`."""
        if not self.shared:
            for k, tensor in whole:
                i, slot = self.slots[k]
                self.buckets[i].view(flats[i], slot).copy_(tensor)
            return
        sends = self._empty()
        for k, tensor in whole:
            flat = in_memory_order(tensor, self.slots[k][1].parameter)
            for rank, elements in enumerate(self.ranges[k]):
                sends[rank].append(flat[elements.start : elements.stop])
        sizes = [list[int]() for _ in range(self.world.size)]
        for ranges, owner in zip(self.ranges, self.owners, strict=True):
            sizes[owner].append(len(ranges[self.world.rank]))
        # An owner sends its tensors in the order of `slots`, so its next piece is the next one that it owns.
        pieces_by_rank = [iter(pieces) for pieces in self._exchange(sends, sizes)]
        for (i, slot), owner in zip(self.slots, self.owners, strict=True):
            self.buckets[i].local_part(flats[i], slot).copy_(next(pieces_by_rank[owner]))

    def _empty(self) -> list[list[Tensor]]:
        """For each process, nothing yet."""
        return [[] for _ in range(self.world.size)]

    def _exchange(self, sends: list[list[Tensor]], sizes: list[list[int]]) -> list[list[Tensor]]:
        """Send each process its tensors. sizes: of what comes from each one."""
        # A process may own no tensor, and no piece of one: torch.cat refuses an empty list (seen with 5 processes).
        nothing = self.buckets[0].weights[:0]
        flat = torch.cat([nothing, *chain.from_iterable(sends)])
        counts = [*map(sum, sizes)]
        received = torch.empty(sum(counts), dtype=flat.dtype, device=self.world.comm_device)
        all_to_all(received, flat.to(received.device), counts, [sum(map(len, tensors)) for tensors in sends])
        parts = received.to(flat.device).split(counts)
        return [list(part.split(of_rank)) for part, of_rank in zip(parts, sizes, strict=True)]


def cost(shape: torch.Size) -> int:
    """The multiplications that it takes to make a matrix orthogonal, up to a factor."""
    return shape.numel() * min(shape)


def owners(costs: Sequence[int], size: int) -> list[int]:
    """Choose which of `size` processes gets each matrix: the most expensive first, to whoever has least to do.

    Graham 1969: the busiest one then has at most 4/3 of what it must have.
    """
    out, load = [0] * len(costs), [0] * size
    # Of equal costs the earlier matrix first, and of equal loads the lower rank: all processes must choose alike.
    for k in sorted(range(len(costs)), key=lambda k: (-costs[k], k)):
        out[k] = load.index(min(load))
        load[out[k]] += costs[k]
    return out
