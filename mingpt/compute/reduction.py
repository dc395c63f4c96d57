"""Sums the microbatches' gradients in an order that does not depend on which process computed them (tree.py).

Each process adds its own microbatches along the tree, as far as its subtrees are complete. Then, for each bucket, each
process gets its slice of all partial sums, which it adds along the rest of the tree (exchange.py). The update then runs
on that slice, and the weights come back (optimizer.py). If the shares are complete subtrees (M and the world size
powers of two), this sends as many bytes as a ring all-reduce, or fewer; docs/exactness.md has the measurements.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.compute.buckets import Bucket, Slot, exchange_count
from mingpt.compute.exchange import Exchange, hops
from mingpt.compute.tree import Subtree, parents
from mingpt.world.world import World, all_gather, all_reduce

MAX_IN_FLIGHT = 2  # exchanges at a time: the network has one while the next is sent, and more would need memory


class Reduction:
    """Takes each microbatch's gradients out of .grad, and sums those of all processes.

    In each step: `begin`; `expect` before each backward; `finish` after the last one. The last backward sends a bucket
    as soon as its gradients are complete, in one order in every process.

    sums: for each bucket, the sum over all M microbatches of the slice that this process owns; from `finish` to
    `begin`.
    """

    def __init__(self, buckets: Sequence[Bucket], world: World) -> None:
        self.buckets, self.world = buckets, world
        # Of each parameter, its bucket's index and its place there.
        self.place = dict[Tensor, tuple[int, Slot]]()
        self.sums: list[Tensor] = []
        # Whether the microbatch is this process's last one of the step.
        self.last = False
        # A CPU adds a gradient at once, while it is in the cache. For a GPU all of a bucket wait for each other: its
        # host then launches one addition for all, in place of 148 for GPT-2 (43 us each on an H200's host).
        self.by_bucket = world.device.type == "cuda"
        self._microbatch: int | None = None  # from `expect` until its gradients are complete
        self._missing: list[set[Tensor]] = []  # by bucket, the parameters without a gradient so far
        self._waiting: list[list[tuple[Slot, Tensor]]] = [[] for _ in buckets]  # gradients for the rest of their bucket
        self._complete = 0  # how many buckets have all gradients
        self._into: Mapping[Bucket, Tensor] | None = None  # within `writes_to`
        for i, bucket in enumerate(buckets):
            for slot in bucket.slots:
                self.place[slot.parameter] = i, slot
                # Hooks, not .grad after backward: so a bucket travels while backward computes the layers before.
                slot.parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def begin(self) -> None:
        self.sums, self.last, self._microbatch = [], False, None
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        for waiting in self._waiting:
            waiting.clear()
        for p in self.place:
            p.grad = None

    def expect(self, microbatch: int, last: bool) -> None:
        """The next backward is that of this microbatch. last: whether it is this process's last one."""
        self._add_unused()
        self._microbatch, self.last, self._complete = microbatch, last, 0
        self._expect_all()

    def _expect_all(self) -> None:
        self._missing = [{slot.parameter for slot in bucket.slots} for bucket in self.buckets]

    @contextmanager
    def writes_to(self, gradients: Mapping[Bucket, Tensor]) -> Iterator[None]:
        """A backward within adds nothing to the sums: it writes its gradients there, in the buckets' layout.

        Raises RuntimeError unless there was one gradient for each parameter.
        """
        self._add_unused()
        self._into = gradients
        self._expect_all()
        try:
            yield
            if any(self._missing):
                names = [slot.name for p, (i, slot) in self.place.items() if p in self._missing[i]]
                raise RuntimeError(f"a microbatch has no gradient of {', '.join(names)}")
        finally:
            self._into = None
            self._forget_gradients()

    def finish(self) -> None:
        if not self.last:
            raise RuntimeError("a part of the gradients is missing: call `expect` before the last backward")
        self._add_unused()
        self.sums = [self._sum(bucket) for bucket in self.buckets]

    def _add_unused(self) -> None:
        """Add zeros as the gradients of what the microbatch did not use."""
        if self._microbatch is not None:
            for p, (i, _) in self.place.items():
                if p in self._missing[i]:
                    # Not left out: so every bucket is complete in every microbatch, and is sent.
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                    self._on_gradient(p)
        self._microbatch = None

    def _on_gradient(self, p: Tensor) -> None:
        """Autograd calls it when a backward has completed a parameter's gradient."""
        # A backward that nobody has announced is not the run's: an evaluation's, a user's.
        if p.grad is None or (self._microbatch is None and self._into is None):
            return
        gradient, p.grad = p.grad, None
        i, slot = self.place[p]
        if p not in self._missing[i]:
            # Its bucket may have been sent already, without this part.
            raise RuntimeError(f"the gradient of {slot.name} came in parts: use checkpoint(…, use_reentrant=False)")
        self._missing[i].remove(p)
        bucket, waiting = self.buckets[i], self._waiting[i]
        waiting.append((slot, gradient))
        if self.by_bucket and self._missing[i]:
            return
        slots = [slot for slot, _ in waiting]
        gradients = [gradient for _, gradient in waiting]
        waiting.clear()
        if self._into is not None:
            torch._foreach_copy_(bucket.views(self._into[bucket], slots), gradients)
            return
        self._add(bucket, gradients, slots)
        # In the buckets' order, whichever is complete first: collectives must begin in one order in every process, and
        # what a process's microbatch uses decides when its buckets are complete.
        while self._complete < len(self.buckets) and not self._missing[self._complete]:
            self._send(self.buckets[self._complete])
            self._complete += 1

    def _add(self, bucket: Bucket, gradients: list[Tensor], slots: Sequence[Slot] | None) -> None:
        """Take gradients of the microbatch: one for each slot. slots: None: of the whole bucket, in its layout."""
        raise NotImplementedError

    def _send(self, bucket: Bucket) -> None:
        """Begin the bucket's exchange if these were its last gradients. All of the microbatch's have been added."""
        raise NotImplementedError

    def _sum(self, bucket: Bucket) -> Tensor:
        raise NotImplementedError


class ExactReduction(Reduction):
    """Sums along the tree. (Plain accumulation in .grad would add from left to right.)

    Keeps a stack of partial sums, one for each complete subtree, in the buckets' layout, which is that of the messages.
    Each gradient is added when autograd delivers it, and then freed. When two subtrees are siblings, the left one takes
    the right one in. The stack has at most 1 + log2(own microbatches), rounded up, copies of the gradients if the share
    is one subtree, otherwise up to 1.6 times as many (tried for all worlds up to 32 and up to 128 microbatches).
    """

    def __init__(self, buckets: Sequence[Bucket], microbatches: int, world: World) -> None:
        super().__init__(buckets, world)
        self.parents = parents(microbatches)
        self.hops = hops(world, microbatches)
        self.stack: list[tuple[Subtree, dict[Bucket, Tensor]]] = []
        self._siblings: list[dict[Bucket, Tensor]] = []  # what the gradients are added to: each sum to the next one
        self._in_flight = deque[tuple[Bucket, Exchange]]()
        self._totals = defaultdict[Bucket, list[Tensor]](list)  # of each bucket's exchanges, from left to right

    def begin(self) -> None:
        super().begin()
        self.stack.clear()

    def expect(self, microbatch: int, last: bool) -> None:
        super().expect(microbatch, last)
        self._climb(microbatch)

    def accumulate(self, microbatch: int, last: bool, gradients: Mapping[Bucket, Tensor]) -> None:
        """Add a microbatch whose gradients are complete, in the buckets' layout, in place of `expect` and a backward.

        They are not kept: the next replay of a graph may write there.
        """
        self._add_unused()
        self.last = last
        self._climb(microbatch)
        for bucket in self.buckets:
            self._add(bucket, [gradients[bucket]], None)
            self._send(bucket)

    def _climb(self, microbatch: int) -> None:
        """Find the sums to which the tree adds this microbatch, one after the other."""
        subtree: Subtree = (microbatch, microbatch + 1)
        self._siblings = []
        while self.stack and (parent := self.parents.get((self.stack[-1][0], subtree))):
            self._siblings.append(self.stack.pop()[1])
            subtree = parent
        self.stack.append((subtree, self._siblings[-1] if self._siblings else {}))

    def _add(self, bucket: Bucket, gradients: list[Tensor], slots: Sequence[Slot] | None) -> None:
        # sibling + gradient, then the parent's sibling + that sum, and so on: the left one first, as in tree_sum. One
        # operation for a level of the tree.
        for sums in self._siblings:
            places = bucket.views(sums[bucket], slots)
            torch._foreach_add_(places, gradients)
            gradients = places
        if not self._siblings:
            # A left child: its gradients are the sum, in the layout that travels.
            sums = self.stack[-1][1]
            if bucket not in sums:
                sums[bucket] = bucket.empty()
            torch._foreach_copy_(bucket.views(sums[bucket], slots), gradients)

    def _send(self, bucket: Bucket) -> None:
        # All but the topmost sum were added to another one, and only held their memory until the bucket was complete.
        for sums in self._siblings[:-1]:
            del sums[bucket]
        if not self.last:
            return
        partials = [sums.pop(bucket) for _, sums in self.stack]
        if bucket.size == 1:
            (total,) = partials
            self._totals[bucket] = [total]
            return
        # The last bucket, an embedding's, has no backward to hide behind. In two hops it goes in several exchanges:
        # while one is copied and travels its first hop, the one before travels its second. Those of another bucket
        # would hold up backward, which goes on while two are under way. In one hop nothing would overlap.
        several = len(self.hops) > 1 and bucket is self.buckets[-1]
        count = exchange_count(bucket.weights.nbytes) if several else 1
        # Each of them has a part of every process's slice, so that all owners are busy in all exchanges.
        by_slice = [p.view(-1, self.hops[0].world.size, bucket.length).tensor_split(count, 2) for p in partials]
        for rows in zip(*by_slice, strict=True):
            if len(self._in_flight) == MAX_IN_FLIGHT:
                self._receive()
            # Rank r's slice goes to process r % peers of the first hop. With one row and one hop, a whole bucket is not
            # copied. A copy for each process would cost a GPU's host 28 ms a step with 16 processes and GPT-2, 890 ms
            # with 512.
            flat = torch.stack(rows) if len(rows) > 1 else rows[0][None]  # row, slice, peer, element
            parts = flat.permute(2, 0, 1, 3).contiguous().to(self.world.comm_device)
            self._in_flight.append((bucket, Exchange(self.hops, self.parents, parts)))
            if len(self._in_flight) > 1:  # now that this one's first hop has begun: so waiting costs no time
                self._in_flight[0][1].next_hop()

    def _receive(self) -> None:
        """Wait for the exchange that began first."""
        bucket, exchange = self._in_flight.popleft()
        self._totals[bucket].append(exchange.result())

    def _sum(self, bucket: Bucket) -> Tensor:
        for _, exchange in self._in_flight:  # the last one has one more hop to go
            exchange.next_hop()
        while self._in_flight:
            self._receive()
        parts = self._totals.pop(bucket)
        total = parts[0] if len(parts) == 1 else torch.cat(parts)
        if bucket.size > 1 and not bucket.shard:
            # optimizer.shard=false: each process updates all. The slices' bits are the same, so the gathered sum's are.
            gathered = total.new_empty(len(bucket.weights))
            all_gather(gathered, total)
            total = gathered
        return total.to(bucket.weights.device)


class FastReduction(Reduction):
    """reduce=fast, a plain all-reduce as in DDP: its bits depend on the number of processes.

    Microbatches add up in .grad; gloo or nccl add the processes in an order of their own.
    """

    def __init__(self, buckets: Sequence[Bucket], world: World) -> None:
        super().__init__(buckets, world)
        self._flat = dict[Bucket, Tensor]()
        self._works = dict[Bucket, dist.Work]()

    def expect(self, microbatch: int, last: bool) -> None:
        if last:  # the others add to .grad
            super().expect(microbatch, last)

    def _add(self, bucket: Bucket, gradients: list[Tensor], slots: Sequence[Slot] | None) -> None:
        if bucket not in self._flat:
            self._flat[bucket] = bucket.empty()
        torch._foreach_copy_(bucket.views(self._flat[bucket], slots), gradients)

    def _send(self, bucket: Bucket) -> None:
        flat = self._flat[bucket] = self._flat[bucket].to(self.world.comm_device)
        self._works[bucket] = all_reduce(flat, async_op=True)

    def _sum(self, bucket: Bucket) -> Tensor:
        self._works.pop(bucket).wait()
        return self._flat.pop(bucket).to(bucket.weights.device)
