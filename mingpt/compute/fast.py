"""reduce=fast: the sum as DDP has it. Its bits depend on the number of processes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.compute.buckets import Bucket, Slot
from mingpt.compute.reduction import Reduction
from mingpt.world.world import World, all_reduce


class FastReduction(Reduction):
    """Plain all-reduce: microbatches add up in .grad; gloo or nccl add the processes in an order of their own."""

    def __init__(self, buckets: Sequence[Bucket], world: World) -> None:
        super().__init__(buckets, world)
        self._flat = dict[Bucket, Tensor]()
        self._works = dict[Bucket, dist.Work]()

    def push(self, microbatch: int) -> None:
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
