"""Sums the microbatches' gradients in an order that does not depend on which process computed them (tree.py).

Each process adds its own microbatches along the tree, as far as its subtrees are complete. Then, for each bucket, each
process gets its slice of all partial sums, which it adds along the rest of the tree (exchange.py). The update then runs
on that slice, and the weights come back (optimizer.py). If the shares are complete subtrees (M and the world size
powers of two), this sends as many bytes as a ring all-reduce, or fewer; docs/exactness.md has the measurements.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mingpt.compute.buckets import Bucket, Slot
from mingpt.compute.exchange import Flight, hops
from mingpt.compute.tree import Node, parents
from mingpt.world.world import World, all_gather

See = Callable[[int, Tensor, Tensor], None]  # microbatch, parameter, its gradient


class Reduction:
    """Takes each microbatch's gradients out of .grad, and sums those of all processes.

    In each step: `begin`; `push` after each backward but the last; `arm` before the last one, `finish` after it. During
    the last backward a bucket is sent as soon as its gradients are there, in the same order in every process.

    sums: for each bucket, the sum over all M microbatches of the slice that this process owns; from `finish` to
    `begin`. see: called with each gradient, before anything is added to it.
    """

    def __init__(self, buckets: Sequence[Bucket], world: World) -> None:
        self.buckets, self.world = buckets, world
        slots = [(i, slot) for i, bucket in enumerate(buckets) for slot in bucket.slots]
        self.place: dict[Tensor, tuple[int, Slot]] = {slot.parameter: (i, slot) for i, slot in slots}
        self.sums: list[Tensor] = []
        self.see: See | None = None
        self._last: int | None = None  # the last microbatch, while its gradients are awaited
        self._awaited: list[set[Tensor]] = []  # of each bucket, the parameters whose gradient is not there
        self._started = 0  # how many buckets have been sent
        for _, slot in slots:
            slot.parameter.register_post_accumulate_grad_hook(self._ready)

    def begin(self) -> None:
        self.sums, self._last = [], None
        for p in self.place:
            p.grad = None

    def push(self, microbatch: int) -> None:
        raise NotImplementedError

    def arm(self, microbatch: int) -> None:
        """The next backward is that of this process's last microbatch."""
        self._last, self._started = microbatch, 0
        self._awaited = [{slot.parameter for slot in bucket.slots} for bucket in self.buckets]

    def finish(self) -> None:
        if self._last is None:
            raise RuntimeError("a part of the gradients is missing: the last backward was not announced (`arm`)")
        for p, (i, _) in self.place.items():
            if p in self._awaited[i]:  # the last microbatch does not use it
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                self._ready(p)
        self._last = None
        self.sums = [self._sum(bucket) for bucket in self.buckets]

    def _ready(self, p: Tensor) -> None:
        """Autograd calls it when a backward has completed a parameter's gradient."""
        if self._last is None or p.grad is None:
            return
        gradient, p.grad = p.grad, None
        i, slot = self.place[p]
        if p not in self._awaited[i]:
            raise RuntimeError(f"the gradient of {slot.name} came in parts: use checkpoint(…, use_reentrant=False)")
        self._awaited[i].remove(p)
        if self.see:
            self.see(self._last, p, gradient)
        self._put(self.buckets[i], slot, gradient)
        while self._started < len(self.buckets) and not self._awaited[self._started]:
            self._start(self.buckets[self._started])
            self._started += 1

    def _put(self, bucket: Bucket, slot: Slot, gradient: Tensor) -> None:
        """Take the last microbatch's gradient of one parameter."""
        raise NotImplementedError

    def _start(self, bucket: Bucket) -> None:
        """All gradients of the bucket have been put: send them."""
        raise NotImplementedError

    def _sum(self, bucket: Bucket) -> Tensor:
        raise NotImplementedError


class ExactReduction(Reduction):
    """Sums along the tree. (Plain accumulation in .grad would add from left to right.)

    Keeps a stack of partial sums, and adds two neighbours as soon as they are siblings. The stack has at most 1 +
    log2(own microbatches), rounded up, copies of the gradients if the share is one subtree, otherwise up to 1.6 times
    as many (tried for all worlds up to 32 and up to 128 microbatches).
    """

    def __init__(self, buckets: Sequence[Bucket], microbatches: int, world: World) -> None:
        super().__init__(buckets, world)
        self.parents = parents(microbatches)
        self.hops = hops(world, microbatches)
        first = self.hops[0]
        self.rows = len(first.held[first.world.rank])  # partial sums that this process sends
        self.stack: list[tuple[Node, dict[Tensor, Tensor]]] = []
        self._partials = dict[Bucket, Tensor]()  # to send: (rows, elements of the bucket)
        self._flights = dict[Bucket, Flight]()

    def begin(self) -> None:
        super().begin()
        self.stack.clear()

    def push(self, microbatch: int) -> None:
        """Move a microbatch's gradients from .grad to the stack, and add complete siblings."""
        node: Node = (microbatch, microbatch + 1)
        gradients: list[Tensor] = []
        for p in self.place:
            gradients.append(torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = None  # so that the next backward stores a new tensor instead of adding to this one
            if self.see:
                self.see(microbatch, p, gradients[-1])
        while self.stack and (parent := self.parents.get((self.stack[-1][0], node))):
            torch._foreach_add_(gradients, list(self.stack.pop()[1].values()))
            node = parent
        self.stack.append((node, dict(zip(self.place, gradients, strict=True))))

    def _put(self, bucket: Bucket, slot: Slot, gradient: Tensor) -> None:
        p = slot.parameter
        for _, sums in reversed(self.stack[self.rows - 1 :]):
            gradient.add_(sums.pop(p))
        if bucket not in self._partials:
            self._partials[bucket] = bucket.weights.new_zeros(self.rows, len(bucket.weights))
        # One copy for each row, in the bucket's own layout: a copy for each process would cost a GPU's host 28 ms a
        # step with 16 processes and GPT-2, 890 ms with 512. `_start` puts the slices in the order of the processes.
        partials = [*(sums.pop(p) for _, sums in self.stack[: self.rows - 1]), gradient]
        for flat, partial in zip(self._partials[bucket], partials, strict=True):
            bucket.view(flat, slot).copy_(partial)

    def _start(self, bucket: Bucket) -> None:
        behind = [*self._flights.values()][-1:]
        if bucket.size > 1:
            # Rank r's slice goes to process r % peers of the first hop. With one row and one hop, nothing is copied.
            peers = self.hops[0].world.size
            slices = self._partials.pop(bucket).view(self.rows, -1, peers, bucket.length)
            parts = slices.permute(2, 0, 1, 3).contiguous().to(self.world.comm_device)
            self._flights[bucket] = Flight(self.hops, self.parents, parts)
        for flight in behind:  # now that this bucket's first hop has begun: so waiting costs no time
            flight.go_on()

    def _sum(self, bucket: Bucket) -> Tensor:
        if bucket.size == 1:
            return self._partials.pop(bucket)[0]
        for flight in self._flights.values():  # the last one has one more hop to go
            flight.go_on()
        total = self._flights.pop(bucket).land()
        if not bucket.shard:
            whole = total.new_empty(len(bucket.weights))
            all_gather(whole, total)
            total = whole
        return total.to(bucket.weights.device)
