"""Sums the microbatches' gradients in an order that does not depend on which process computed them (tree.py).

Each process adds its own microbatches along the tree, as far as its subtrees are complete. Then, for each bucket, each
process gets its slice of all partial sums, which it adds along the rest of the tree (exchange.py). The update then runs
on that slice, and the weights come back (optimizer.py). If the shares are complete subtrees (M and the world size
powers of two), this sends as many bytes as a ring all-reduce, or fewer; docs/exactness.md has the measurements.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.compute.buckets import Bucket, Slot
from mingpt.compute.exchange import Exchange, hops
from mingpt.compute.tree import Subtree, parents
from mingpt.world.world import World, all_gather, all_reduce

OnGradient = Callable[[int, Tensor, Tensor], None]  # microbatch, parameter, its gradient


class Reduction:
    """Takes each microbatch's gradients out of .grad, and sums those of all processes.

    In each step: `begin`; `accumulate` after each backward but the last; `expect_last` before the last one, `finish`
    after it. The last backward sends a bucket as soon as its gradients are complete, in one order in every process.

    sums: for each bucket, the sum over all M microbatches of the slice that this process owns; from `finish` to
    `begin`. on_gradient: called with each gradient, before anything is added to it.
    """

    def __init__(self, buckets: Sequence[Bucket], world: World, on_gradient: OnGradient | None = None) -> None:
        self.buckets, self.world, self.on_gradient = buckets, world, on_gradient
        slots = [(i, slot) for i, bucket in enumerate(buckets) for slot in bucket.slots]
        self.place: dict[Tensor, tuple[int, Slot]] = {slot.parameter: (i, slot) for i, slot in slots}
        self.sums: list[Tensor] = []
        self._last: int | None = None  # the last microbatch, from `expect_last` to `finish`
        self._missing: list[set[Tensor]] = []  # by bucket, the parameters without a gradient so far
        self._started = 0  # how many buckets have been sent
        for _, slot in slots:
            slot.parameter.register_post_accumulate_grad_hook(self._ready)

    def begin(self) -> None:
        self.sums, self._last = [], None
        for p in self.place:
            p.grad = None

    def accumulate(self, microbatch: int) -> None:
        raise NotImplementedError

    def expect_last(self, microbatch: int) -> None:
        """The next backward is that of this process's last microbatch."""
        self._last, self._started = microbatch, 0
        self._missing = [{slot.parameter for slot in bucket.slots} for bucket in self.buckets]

    def finish(self) -> None:
        if self._last is None:
            raise RuntimeError("a part of the gradients is missing: call `expect_last` before the last backward")
        for p, (i, _) in self.place.items():
            if p in self._missing[i]:  # the last microbatch does not use it
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
        if p not in self._missing[i]:
            raise RuntimeError(f"the gradient of {slot.name} came in parts: use checkpoint(…, use_reentrant=False)")
        self._missing[i].remove(p)
        if self.on_gradient:
            self.on_gradient(self._last, p, gradient)
        self._put(self.buckets[i], slot, gradient)
        while self._started < len(self.buckets) and not self._missing[self._started]:
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

    def __init__(
        self, buckets: Sequence[Bucket], microbatches: int, world: World, on_gradient: OnGradient | None = None
    ) -> None:
        super().__init__(buckets, world, on_gradient)
        self.parents = parents(microbatches)
        self.hops = hops(world, microbatches)
        first = self.hops[0]
        self.rows = len(first.sent[first.world.rank])  # partial sums that this process sends
        self.stack: list[tuple[Subtree, dict[Tensor, Tensor]]] = []
        self._partials = dict[Bucket, Tensor]()  # to send: (rows, elements of the bucket)
        self._exchanges = dict[Bucket, Exchange]()

    def begin(self) -> None:
        super().begin()
        self.stack.clear()

    def accumulate(self, microbatch: int) -> None:
        """Move a microbatch's gradients from .grad to the stack, and add complete siblings."""
        subtree: Subtree = (microbatch, microbatch + 1)
        gradients: list[Tensor] = []
        for p in self.place:
            gradients.append(torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = None  # so that the next backward stores a new tensor instead of adding to this one
            if self.on_gradient:
                self.on_gradient(microbatch, p, gradients[-1])
        while self.stack and (parent := self.parents.get((self.stack[-1][0], subtree))):
            torch._foreach_add_(gradients, list(self.stack.pop()[1].values()))
            subtree = parent
        self.stack.append((subtree, dict(zip(self.place, gradients, strict=True))))

    def _put(self, bucket: Bucket, slot: Slot, gradient: Tensor) -> None:
        p = slot.parameter
        # The sums from row rows - 1 on are one subtree with the last microbatch: `accumulate` would merge them now.
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
        previous = next(reversed(self._exchanges.values()), None)
        if bucket.size > 1:
            # Rank r's slice goes to process r % peers of the first hop. With one row and one hop, nothing is copied.
            peers = self.hops[0].world.size
            slices = self._partials.pop(bucket).view(self.rows, -1, peers, bucket.length)  # row, slice, peer, element
            parts = slices.permute(2, 0, 1, 3).contiguous().to(self.world.comm_device)
            self._exchanges[bucket] = Exchange(self.hops, self.parents, parts)
        if previous:  # now that this bucket's first hop has begun: so waiting costs no time
            previous.next_hop()

    def _sum(self, bucket: Bucket) -> Tensor:
        if bucket.size == 1:
            return self._partials.pop(bucket)[0]
        for exchange in self._exchanges.values():  # the last one has one more hop to go
            exchange.next_hop()
        total = self._exchanges.pop(bucket).result()
        if not bucket.shard:
            whole = total.new_empty(len(bucket.weights))
            all_gather(whole, total)
            total = whole
        return total.to(bucket.weights.device)


class FastReduction(Reduction):
    """reduce=fast, a plain all-reduce as in DDP: its bits depend on the number of processes.

    Microbatches add up in .grad; gloo or nccl add the processes in an order of their own.
    """

    def __init__(self, buckets: Sequence[Bucket], world: World) -> None:
        super().__init__(buckets, world)
        self._flat = dict[Bucket, Tensor]()
        self._works = dict[Bucket, dist.Work]()

    def accumulate(self, microbatch: int) -> None:
        """The next backward adds to .grad."""

    def _put(self, bucket: Bucket, slot: Slot, gradient: Tensor) -> None:
        if bucket not in self._flat:
            self._flat[bucket] = torch.zeros_like(bucket.weights)
        bucket.view(self._flat[bucket], slot).copy_(gradient)

    def _start(self, bucket: Bucket) -> None:
        flat = self._flat[bucket] = self._flat[bucket].to(self.world.comm_device)
        self._works[bucket] = all_reduce(flat, async_op=True)

    def _sum(self, bucket: Bucket) -> Tensor:
        self._works.pop(bucket).wait()
        return self._flat.pop(bucket).to(bucket.weights.device)
