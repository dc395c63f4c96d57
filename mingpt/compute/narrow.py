"""Weights on their way to the other processes: those that the model only reads in 16 bits travel in 16 bits.

Under autocast a linear layer rounds its matrix to bf16 or fp16, and to round twice is to round once: the forward and
the backward pass have the same bits. So a process holds such a matrix rounded, but for the slice that it owns. That is
why snapshots take them by slice.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mingpt.compute.buckets import Bucket, Sliced
from mingpt.model.language import LanguageModel


def narrow_names(model: nn.Module, autocast: Any) -> set[str]:
    """The parameters that nothing reads but linear layers under `autocast`: the matrices of a language model's layers.

    Not the embedding, which is looked up in float32.
    """
    if not isinstance(autocast, torch.autocast) or not isinstance(model, LanguageModel):
        return set()
    layers = model.LAYER.removesuffix("0.")
    return {name for name, p in model.named_parameters() if name.startswith(layers) and p.dim() == 2}


def pack(buckets: Sequence[Bucket], names: Collection[str], autocast: Any) -> dict[Bucket, "Packing"]:
    """For the buckets with weights that travel in 16 bits."""
    packed = [b for b in buckets if b.shard and any(slot.name in names for slot in b.slots)]
    return {bucket: Packing(bucket, names, autocast.fast_dtype) for bucket in packed}


class Packing:
    """Turns a bucket's slices into messages, and back. length: of a message, in bytes.

    A message is the whole slice in 16 bits, and then the pieces of it that must not be rounded, such as biases, as they
    are. So all slices are unpacked by one copy, whatever their number, and the few such pieces by one more.
    """

    def __init__(self, bucket: Bucket, names: Collection[str], dtype: torch.dtype) -> None:
        """names: the parameters that travel as `dtype`, of 16 bits. The padding between parameters is zeros."""
        self.bucket, self.names, self.dtype = bucket, names, dtype
        starts = range(0, len(bucket.weights), bucket.length)
        slices = [bucket.pieces(range(start, start + bucket.length)) for start in starts]
        # The pieces of each slice that are not rounded, by rank.
        self.whole = [[part for slot, part in pieces if slot.name not in names] for pieces in slices]
        self.sizes = [[(part.stop - part.start) * 4 for part in parts] for parts in self.whole]
        self.narrow = bucket.length * 2
        self.length = self.narrow + max(map(sum, self.sizes))

    def own(self) -> dict[str, Tensor | Sliced]:
        """The weights of which this process has no more than its slice."""
        bucket = self.bucket
        return {slot.name: bucket.tensor(bucket.mine, slot) for slot in bucket.slots if slot.name in self.names}

    def pack(self, mine: Tensor) -> Tensor:
        """mine: this process's slice of the weights. Returns (length,) bytes."""
        message = torch.zeros(self.length, dtype=torch.uint8, device=mine.device)
        message[: self.narrow].view(self.dtype).copy_(mine)
        rank = self.bucket.rank
        if self.whole[rank]:
            torch._foreach_copy_(self._pieces(message, rank), [mine[part] for part in self.whole[rank]])
        return message

    def _pieces(self, message: Tensor, rank: int) -> list[Tensor]:
        """Where in the message of `rank` the pieces are that are not rounded."""
        end = self.narrow + sum(self.sizes[rank])
        return [piece.view(self.bucket.weights.dtype) for piece in message[self.narrow : end].split(self.sizes[rank])]

    def unpack(self, messages: Tensor) -> None:
        """Write the other processes' slices into the bucket. messages: (processes, length) bytes."""
        mine = self.bucket.rank
        slices = self.bucket.weights.view(self.bucket.size, self.bucket.length)
        for others in (slice(0, mine), slice(mine + 1, None)):
            slices[others].copy_(messages[others, : self.narrow].view(self.dtype))
        ranks = [rank for rank in range(self.bucket.size) if rank != mine and self.whole[rank]]
        if ranks:
            to = [slices[rank][part] for rank in ranks for part in self.whole[rank]]
            torch._foreach_copy_(to, [piece for rank in ranks for piece in self._pieces(messages[rank], rank)])
