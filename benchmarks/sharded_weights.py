"""`python benchmarks/sharded_weights.py [key=value …] [--worlds 1 2 4 3]`: weights in slices, a prototype. Prints JSON.

Two ways to train a small GPT for a few steps. whole: the trainer's own step, in which every process has all weights.
slices: a process keeps its slice of the weights, too. A block's weights are gathered before it computes, in forward and
again in backward; each microbatch's gradients go to the owners of slices as soon as a bucket of them is complete. Both
ways, in all worlds, must end with one digest, that of `mingpt snapshots digest`. docs/large.md says why.

Of the process that has most, in bytes: peak, kept: its tensors, at a step's worst moment and between steps. sums: its
partial sums between rounds, at most. sent: what it sends in a step; an all-gather sends a slice to each other process.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mingpt.commands.footprint import Living
from mingpt.compose.compose import configure
from mingpt.compute.buckets import Bucket, Slot, make_buckets
from mingpt.compute.exchange import WeightGather
from mingpt.compute.reduction import Reduction
from mingpt.compute.tree import Subtree, parents
from mingpt.config.schema import Config
from mingpt.data.opening import open_data
from mingpt.model.language import LanguageModel
from mingpt.snapshot.format import SharedState, TensorInfo, digest_of, encode_part
from mingpt.snapshot.staging import Staging
from mingpt.train.context import StepContext
from mingpt.train.factory import build
from mingpt.train.setup import context_of, place_model
from mingpt.train.step import train_step
from mingpt.world.joining import join
from mingpt.world.world import World, all_gather, all_to_all

SETTINGS = (
    "model=gpt2", "model.n_layer=8", "model.n_head=4", "model.n_embd=128", "model.block_size=16", "model.dropout=0.1",
    "data=random", "data.vocabulary=512", "batch.micro_size=1", "batch.global_size=16", "train.max_steps=3",
    "schedule.decay_steps=9", "run.dir=unused",
)  # fmt: skip
# The trainer's buckets are of 25 MiB, or of one tensor: at 7 billion parameters nearly each matrix is one. This model's
# are as small beside its blocks (793 kB).
BUCKET_BYTES = 2**18
IN_FLIGHT = 2  # buckets whose gradients are on their way at a time


class SlicedBucket(Bucket):
    """A bucket of which this process keeps its slice. `weights` has memory only from `gather` to `free`.

    The parameters, and what autograd has saved of them, are views of one storage, which loses its memory and gets it
    back, as in torch's FSDP.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], world: World, shard: bool) -> None:
        super().__init__(named, world, shard)
        self.kept = self.weights[self.owned.start : self.owned.stop]
        if self.shard:
            self.kept = self.kept.clone()
        self.bytes = self.weights.nbytes
        self.free()

    @property
    def local(self) -> Tensor:
        return self.kept

    def free(self) -> None:
        if self.shard:
            self.weights.untyped_storage().resize_(0)

    def gather(self, gather: WeightGather) -> None:
        storage = self.weights.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.bytes)
            self.weights[self.owned.start : self.owned.stop] = self.kept
            gather.start(self)
            gather.finish()


class Nowhere(WeightGather):
    """In place of the gather after an update: the next step gathers what it needs."""

    def start(self, bucket: Bucket) -> None:
        pass


class Blocks:
    """Gathers the buckets of each block before its forward, and again before its backward.

    After its forward, a block's buckets are freed unless the next block shares them; those of the last block stay for
    its backward. In backward SlicedReduction frees each bucket with its last gradient. outside: buckets with what is in
    no block (embedding, last norm), from the step's begin to its end.
    """

    def __init__(self, model: LanguageModel, buckets: Sequence[SlicedBucket], gather: WeightGather) -> None:
        blocks = list(model.blocks())
        place = {p: i for i, block in enumerate(blocks) for p in block.parameters()}
        uses = {bucket: {place.get(slot.parameter, -1) for slot in bucket.slots} for bucket in buckets}
        self.gather, self.outside = gather, [bucket for bucket in buckets if -1 in uses[bucket]]
        for i, block in enumerate(blocks):
            own = [bucket for bucket in buckets if i in uses[bucket] and -1 not in uses[bucket]]
            gone = [bucket for bucket in own if i + 1 not in uses[bucket]] if i + 1 < len(blocks) else []
            block.register_forward_pre_hook(partial(self._gather, own))
            block.register_forward_hook(partial(self._free, gone))
            block.register_full_backward_pre_hook(partial(self._gather, own))

    def _gather(self, buckets: Sequence[SlicedBucket], *_: Any) -> None:
        for bucket in buckets:
            bucket.gather(self.gather)

    def _free(self, buckets: Sequence[SlicedBucket], *_: Any) -> None:
        for bucket in buckets:
            bucket.free()


class SlicedReduction(Reduction):
    """Sums along the tree, round by round: in round k process p computes microbatch k * W + p.

    In each step: `begin`; in each round `expect_round`, a backward, `finish`. An owner gets the round's gradients of
    its slice, in the order of the microbatches, and adds two neighbours as soon as they are siblings in the tree. If
    M = W * 2^n, a round is one subtree, and n partial sums are the most that stay from round to round.
    """

    def __init__(self, buckets: Sequence[Bucket], microbatches: int, world: World, stay: Sequence[Bucket]) -> None:
        super().__init__(buckets, world)
        self.parents, self.stay = parents(microbatches), stay
        self.stacks = dict[Bucket, list[tuple[Subtree, Tensor]]]()
        self.most = 0  # bytes of partial sums between rounds
        self._flat = dict[Bucket, Tensor]()
        self._pending = list[tuple[Bucket, Tensor, Any]]()

    def begin(self) -> None:
        super().begin()
        self.stacks = {bucket: [] for bucket in self.buckets}

    def expect_round(self, microbatches: range) -> None:
        """The next backward is the round of these microbatches. A process without one computes, and sends nothing."""
        self.microbatches = microbatches
        self.expect(microbatches[0] + self.world.rank, last=True)

    def finish(self) -> None:
        super().finish()
        self.most = max(self.most, sum(total.nbytes for stack in self.stacks.values() for _, total in stack))

    def _add(self, bucket: Bucket, gradients: list[Tensor], slots: Sequence[Slot] | None) -> None:
        if bucket not in self._flat:
            self._flat[bucket] = bucket.empty()
        torch._foreach_copy_(bucket.views(self._flat[bucket], slots), gradients)

    def _start(self, bucket: Bucket) -> None:
        if isinstance(bucket, SlicedBucket) and bucket not in self.stay:
            bucket.free()
        flat, rows, size, work = self._flat.pop(bucket), len(self.microbatches), bucket.length, None
        received = flat
        if self.world.size > 1:
            sends = self.world.rank < rows
            received = flat.new_empty(rows * size)
            sizes = [size * (r < rows) for r in range(self.world.size)], [size * sends] * self.world.size
            work = all_to_all(received, flat if sends else flat[:0], *sizes, async_op=True)
        self._pending.append((bucket, received, work))
        if len(self._pending) > IN_FLIGHT:
            self._arrived(*self._pending.pop(0))

    def _arrived(self, bucket: Bucket, received: Tensor, work: Any) -> None:
        if work:
            work.wait()
        stack = self.stacks[bucket]
        for m, total in zip(self.microbatches, received.view(len(self.microbatches), -1), strict=True):
            subtree = (m, m + 1)
            while stack and (parent := self.parents.get((stack[-1][0], subtree))):
                subtree, total = parent, stack.pop()[1].add_(total)
            stack.append((subtree, total))
        for k, (subtree, total) in enumerate(stack):  # a part of `received` would hold all of it
            if total.untyped_storage().nbytes() > total.nbytes:
                stack[k] = subtree, total.clone()

    def _sum(self, bucket: Bucket) -> Tensor:
        while self._pending:
            self._arrived(*self._pending.pop(0))
        return self.stacks[bucket][-1][1]


def sliced_step(context: StepContext, blocks: Blocks, step: int, batch: Any) -> None:
    """As train_step, but for the order in which the microbatches are computed. batch: a microbatch's tensors."""
    reduction, world, plan = context.reduction, context.world, context.plan
    assert isinstance(reduction, SlicedReduction)
    context.model.train()
    reduction.begin()
    for bucket in blocks.outside:
        bucket.gather(blocks.gather)
    figures = list[Tensor]()
    for first in range(0, plan.microbatches, world.size):
        round_ = range(first, min(first + world.size, plan.microbatches))
        # All take part in each gather, so a process without a microbatch computes one once more, for nobody.
        m = first + world.rank if world.rank < len(round_) else world.rank
        torch.manual_seed(plan.dropout_seed(step, m))
        with context.autocast:
            loss, count = context.model(*batch(m))
        figures.append(torch.stack([loss.detach(), count]).double())
        reduction.expect_round(round_)
        context.update.scaled(loss).backward()
        reduction.finish()
    for bucket in blocks.outside:
        bucket.free()
    mine = torch.stack(figures)
    every = mine.new_empty(world.size, *mine.shape)
    all_gather(every.view(-1), mine.view(-1))
    losses, tokens = every.transpose(0, 1).flatten(0, 1)[: plan.microbatches].T.contiguous()
    context.update(step, losses, tokens.sum(), reduction.sums)


class Counter(Living):
    """Counts tensors that are alive, those that change their size (`watched`) included, and bytes that are sent."""

    def __init__(self) -> None:
        super().__init__(nn.Module())
        self.watched = list[Any]()
        self.peak = self.sent = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(function, types, args, kwargs)
        self.points.clear()
        self.peak = max(self.peak, self.now())
        if function.namespace == "c10d" and dist.get_world_size() > 1:
            others = dist.get_world_size() - 1
            if "allgather" in str(function):
                self.sent += args[1].nbytes * others
            elif "alltoall" in str(function):
                own = args[4][dist.get_rank()] * args[1].itemsize
                self.sent += args[1].nbytes - own
            else:
                raise ValueError(f"{function}: how many bytes it sends is not known here")
        return out

    def now(self) -> int:
        return self.bytes + sum(storage.nbytes() - self._known[storage._cdata] for storage in self.watched)


def digest(state: SharedState, world: World) -> str:
    """As that of a snapshot, by the code that writes one: a process gets the whole tensors of one part at a time."""
    staging, tensors = Staging(world, None, range(world.size)), dict[str, TensorInfo]()
    for part, whole in staging.parts(staging.copy_share(state)):
        tensors |= encode_part(part, whole).tensors
    every = world.gather({name: info.model_dump() for name, info in tensors.items()})
    return digest_of({name: TensorInfo(**info) for share in every for name, info in share.items()})


def train(config: Config, world: World, sliced: bool, bucket_bytes: int) -> dict[str, Any]:
    """Train all steps of the config in one of the ways. Returns the digest, and the figures of the worst process."""
    source, counter = open_data(config.data, config.model.block_size, config.batch.micro_size), Counter()
    bucket = patch("mingpt.compute.buckets.Bucket", SlicedBucket if sliced else Bucket)
    buckets = patch("mingpt.train.context.make_buckets", partial(make_buckets, most=bucket_bytes))
    with counter, bucket, buckets:
        model = build(config, source.vocabulary.size)
        assert isinstance(model, LanguageModel)
        place_model(config, source, model, world)
        context = context_of(config, source, model, world)
        update, plan = context.update, context.plan
        gather, kept = update.weight_gather, [b for b in update.buckets if isinstance(b, SlicedBucket)]
        counter.watched = [b.weights.untyped_storage() for b in kept]
        if sliced:
            blocks = Blocks(model, kept, gather)
            update.weight_gather = Nowhere(world, {})
            context.reduction = reduction = SlicedReduction(kept, plan.microbatches, world, blocks.outside)  # type: ignore[assignment]
            if isinstance(context.autocast, torch.autocast):  # its cache would hold all weights once more, in 16 bits
                context.autocast._cache_enabled = False
        for step in range(config.train.max_steps):
            ids = plan.sample_ids(step).tolist()
            batch = lambda m, ids=ids: source.train[ids[m * plan.micro_size : (m + 1) * plan.micro_size]]  # noqa: E731
            between, counter.peak, counter.sent = counter.now(), 0, 0
            if sliced:
                sliced_step(context, blocks, step, batch)
            else:
                train_step(context, step, map(batch, context.microbatches))
        peak, sent = counter.peak, counter.sent
    state = context.state()
    if sliced:
        state = {**state, "model": {s.name: b.tensor(b.local, s) for b in kept for s in b.slots}}
    sums = reduction.most if sliced else 0
    worst = [max(column) for column in zip(*world.gather([peak, between, sums, sent]), strict=True)]
    row = {"processes": world.size, "way": "slices" if sliced else "whole", "digest": digest(state, world)}
    return row | dict(zip(("peak", "kept", "sums", "sent"), worst, strict=True))


def work(settings: Sequence[str], bucket_bytes: int) -> None:
    """One process of a world: both ways, each printed by rank 0."""
    config = configure(settings)
    with join(config.world) as world:
        for sliced in (False, True):
            row = train(config, world, sliced, bucket_bytes)
            if world.is_main:
                print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="of the run, such as optimizer=muon or precision=bf16")
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2, 4, 3])
    parser.add_argument("--bucket-bytes", type=int, default=BUCKET_BYTES)
    options, digests = parser.parse_intermixed_args(), set[str]()
    settings = [*{text.partition("=")[0]: text for text in (*SETTINGS, *options.settings)}.values()]
    if "RANK" in os.environ:
        return work(settings, options.bucket_bytes)
    for world in options.worlds:
        launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}")
        done = subprocess.run([*launch, *sys.argv], stdout=subprocess.PIPE, text=True, check=True)
        print(done.stdout, end="", flush=True)
        digests |= {json.loads(row)["digest"] for row in done.stdout.splitlines()}
    assert len(digests) == 1, f"the digests differ: {digests}"


if __name__ == "__main__":
    main()
