"""Sums the microbatches' gradients in an order that does not depend on which process computed them.

The order is a binary tree over the M microbatches, which depends on M alone. Floating-point addition is not
associative: a sum of "my microbatches, then all processes" has other bits for another world size; a sum along the tree
has not.

Each process adds its own microbatches along the tree, as far as its subtrees are complete. Then, for each DDP bucket,
an all-to-all sends each process one slice of all partial sums. The process adds them along the rest of the tree, and an
all-gather returns the whole sum. If the shares are complete subtrees (M and the world size powers of two), this sends
as many bytes as a ring all-reduce; docs/exactness.md has the measurements.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mingpt.world.world import World, all_gather, all_reduce, all_to_all, share

Node = tuple[int, int]  # (a, b): the subtree over the microbatches a to b - 1
Value = TypeVar("Value", float, Tensor)
See = Callable[[int, Sequence[Tensor], Sequence[Tensor]], None]  # microbatch, parameters, their gradients


def middle(a: int, b: int) -> int:
    """Where the tree splits the node [a, b) into two children."""
    return (a + b) // 2


def whole_nodes(lo: int, hi: int, a: int, b: int) -> list[Node]:
    """The largest nodes of the subtree [a, b) that are inside [lo, hi), from left to right."""
    if lo <= a and b <= hi:
        return [(a, b)]
    if b <= lo or hi <= a:
        return []
    return whole_nodes(lo, hi, a, middle(a, b)) + whole_nodes(lo, hi, middle(a, b), b)


def tree_sum(a: int, b: int, known: Mapping[Node, Value]) -> Value:
    """The sum of the node [a, b) along the tree. known: the sums of nodes that together cover it."""
    if (a, b) in known:
        return known[a, b]
    return tree_sum(a, middle(a, b), known) + tree_sum(middle(a, b), b, known)


def tree_sum_of(values: Sequence[Value]) -> Value:
    """The sum along the tree of M values, one per microbatch."""
    return tree_sum(0, len(values), {(i, i + 1): v for i, v in enumerate(values)})


def parents(count: int) -> dict[tuple[Node, Node], Node]:
    """The parent of each pair of siblings in the tree over `count` microbatches."""
    out: dict[tuple[Node, Node], Node] = {}
    pending = [(0, count)]
    while pending:
        a, b = pending.pop()
        if b - a > 1:
            left, right = (a, middle(a, b)), (middle(a, b), b)
            out[left, right] = (a, b)
            pending += [left, right]
    return out


class Reduction(Protocol):
    """`push` is called after each microbatch's backward except the last, `finish` once after the last."""

    def push(self, microbatch: int) -> None: ...
    def finish(self) -> None: ...


def _completed(value: Tensor) -> torch.futures.Future[Tensor]:
    """A future that is complete already, for a DDP hook whose work ends in `finish`."""
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[value.device] if value.device.type == "cuda" else None
    )
    future.set_result(value)
    return future


def _views(flat: Tensor, bucket: dist.GradBucket) -> list[Tensor]:
    """Views of each gradient in `flat`, which has the bucket's layout. Strides are the parameters'.

    (`bucket.gradients()` has the right offsets, but always row-major strides.)
    """
    start = bucket.buffer().storage_offset()
    return [
        flat.as_strided(p.shape, p.stride(), flat.storage_offset() + view.storage_offset() - start)
        for view, p in zip(bucket.gradients(), bucket.parameters(), strict=True)
    ]


def _fill_up(parameters: Sequence[Tensor], before: Sequence[Tensor | None]) -> None:
    """Give a zero gradient to each parameter that the last backward did not use. DDP would wait for it for ever.

    before: each .grad before that backward. If .grad is still the same object, the parameter was not used.
    """
    unused = [p for p, gradient in zip(parameters, before, strict=True) if p.grad is gradient]
    if unused:
        torch.autograd.backward(unused, [torch.zeros_like(p) for p in unused])


@dataclass
class _Exchange:
    """The all-to-all of one bucket, which runs during the rest of backward."""

    bucket: Tensor
    sent: Tensor  # must live until the all-to-all has ended
    received: Tensor
    work: dist.Work | None


class ExactReduction:
    """Sums gradients along the tree. After `finish`, every parameter's .grad is the sum over all M microbatches.

    A microbatch that does not use a parameter adds zeros to its sum. (Plain accumulation in .grad would add from left
    to right, not along the tree.)

    Keeps a stack of partial sums, and adds two neighbours as soon as they are siblings. The stack has at most 1 +
    log2(own microbatches), rounded up, copies of the gradients if the share is one subtree, otherwise up to 1.6 times
    as many (tried for all worlds up to 32 and up to 128 microbatches).
    """

    def __init__(self, ddp: DistributedDataParallel, microbatches: int, world: World) -> None:
        self.parameters: list[Tensor] = [p for p in ddp.parameters() if p.requires_grad]
        self.count, self.world = microbatches, world
        self.parents = parents(microbatches)
        self.mine = world.share(microbatches)
        self.nodes = [whole_nodes(s.start, s.stop, 0, microbatches) for s in self.shares()]
        self.stack: list[tuple[Node, dict[Tensor, Tensor]]] = []
        self.exchanges: list[_Exchange] = []
        self.reduced = 0  # elements in this step
        self.see: See | None = None  # called with each microbatch's gradients, before anything is added to them
        ddp.register_comm_hook(state=None, hook=self._hook)

    def shares(self) -> list[range]:
        return [share(r, self.world.size, self.count) for r in range(self.world.size)]

    def push(self, microbatch: int) -> None:
        """Move a microbatch's gradients from .grad, computed under no_sync, to the stack, and add complete siblings."""
        node: Node = (microbatch, microbatch + 1)
        gradients: list[Tensor] = []
        for p in self.parameters:
            gradients.append(torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = None  # so that the next backward stores a new tensor instead of adding to this one
        if self.see:
            self.see(microbatch, self.parameters, gradients)
        while self.stack and (parent := self.parents.get((self.stack[-1][0], node))):
            torch._foreach_add_(gradients, list(self.stack.pop()[1].values()))
            node = parent
        self.stack.append((node, dict(zip(self.parameters, gradients, strict=True))))

    def _hook(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP calls it in the last microbatch's backward for each full bucket, in the same order in every process.

        Returns a future that is complete already, though the bucket has its sum only after `finish`. (Chaining the
        all-gather to a future hung at world 3: futures complete in an order that differs between processes.)
        """
        flat = bucket.buffer()
        self.reduced += flat.numel()
        node: Node = (self.mine[-1], self.mine[-1] + 1)
        parameters = bucket.parameters()
        views = _views(flat, bucket)
        if self.see:
            self.see(self.mine[-1], parameters, views)
        left = len(self.stack)
        while left and (parent := self.parents.get((self.stack[left - 1][0], node))):
            left -= 1
            torch._foreach_add_(views, [self.stack[left][1][p] for p in parameters])
            node = parent
        if self.world.size > 1:
            partial_sums = [flat]
            if left:
                rows = flat.new_empty(left, flat.numel())
                for row, (_node, sums) in zip(rows, self.stack[:left], strict=True):
                    torch._foreach_copy_(_views(row, bucket), [sums[p] for p in parameters])
                partial_sums = [*rows, flat]
            self.exchanges.append(self._start(flat, partial_sums))
        return _completed(flat)

    def _start(self, flat: Tensor, partial_sums: list[Tensor]) -> _Exchange:
        """Begin the all-to-all: each process gets its slice of each of this process's partial sums."""
        size, device = self.world.size, self.world.comm_device
        length = -(-flat.numel() // size)
        sent = torch.zeros(size, len(partial_sums), length, dtype=flat.dtype, device=flat.device)
        for i, partial in enumerate(partial_sums):
            whole = flat.numel() // length
            sent[:whole, i] = partial[: whole * length].view(whole, length)
            if rest := flat.numel() - whole * length:
                sent[whole, i, :rest] = partial[whole * length :]
        sent = sent.to(device)
        counts = [len(nodes) for nodes in self.nodes]
        received = torch.empty(sum(counts), length, dtype=flat.dtype, device=device)
        work = all_to_all(
            received.view(-1),
            sent.view(-1),
            [c * length for c in counts],
            [len(partial_sums) * length] * size,
            async_op=True,
        )
        return _Exchange(flat, sent, received, work)

    def finish(self) -> None:
        """In bucket order: add this process's slice, then all-gather the slices, while later all-to-alls still run."""
        _fill_up(self.parameters, [None] * len(self.parameters))
        if self.reduced != (total := sum(p.numel() for p in self.parameters)):
            raise RuntimeError(f"{self.reduced} of {total} elements of the gradients have been reduced by DDP")
        all_nodes = [node for nodes in self.nodes for node in nodes]
        gathers: list[tuple[Tensor, Tensor, dist.Work | None]] = []
        for exchange in self.exchanges:
            assert exchange.work is not None
            exchange.work.wait()
            mine = tree_sum(0, self.count, dict(zip(all_nodes, exchange.received, strict=True)))
            whole = mine.new_empty(self.world.size * mine.numel())
            gathers.append((exchange.bucket, whole, all_gather(whole, mine, async_op=True)))
        for bucket, whole, work in gathers:
            assert work is not None
            work.wait()
            bucket.copy_(whole[: bucket.numel()])
        self.exchanges.clear()
        self.stack.clear()
        self.reduced = 0


class FastReduction:
    """Plain all-reduce: microbatches add up in .grad; gloo or nccl add the processes in an order of their own."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.works: list[dist.Work | None] = []
        self.parameters: list[Tensor] = [p for p in ddp.parameters() if p.requires_grad]
        self.before: list[Tensor | None] = [None] * len(self.parameters)
        ddp.register_comm_hook(state=None, hook=self._hook)

    def push(self, microbatch: int) -> None:
        self.before = [p.grad for p in self.parameters]  # under no_sync, backward has added to .grad already

    def _hook(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        # DDP's default hook divides by the world size. Here the loss is a sum, and so is its gradient.
        self.works.append(all_reduce(bucket.buffer(), async_op=True))
        return _completed(bucket.buffer())

    def finish(self) -> None:
        _fill_up(self.parameters, self.before)
        self.before = [None] * len(self.parameters)
        for work in self.works:
            assert work is not None
            work.wait()
        self.works.clear()
