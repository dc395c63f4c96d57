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
    """Turns a bucket's slices into messages, and back. length: of a message, in bytes."""

    def __init__(self, bucket: Bucket, names: Collection[str], dtype: torch.dtype) -> None:
        """names: the parameters that travel as `dtype`, of 16 bits. The padding between parameters is zeros."""
        self.bucket, self.names, self.dtype = bucket, names, dtype
        starts = range(0, len(bucket.weights), bucket.length)
        slices = [range(start, start + bucket.length) for start in starts]
        # Of each slice, by rank, and whether as `dtype`.
        self.parts = [[(part, slot.name in names) for slot, part in bucket.pieces(s)] for s in slices]
        self.sizes = [[(p.stop - p.start) * (2 if narrow else 4) for p, narrow in parts] for parts in self.parts]
        self.length = max(map(sum, self.sizes))

    def own(self) -> dict[str, Tensor | Sliced]:
        """The weights of which this process has no more than its slice."""
        bucket = self.bucket
        return {slot.name: bucket.tensor(bucket.mine, slot) for slot in bucket.slots if slot.name in self.names}

    def pack(self, mine: Tensor) -> Tensor:
        """mine: this process's slice of the weights. Returns (length,) bytes."""
        message = torch.zeros(self.length, dtype=torch.uint8, device=mine.device)
        parts, sizes = self.parts[self.bucket.rank], self.sizes[self.bucket.rank]
        for (part, narrow), piece in zip(parts, message[: sum(sizes)].split(sizes), strict=True):
            piece.view(self.dtype if narrow else mine.dtype).copy_(mine[part])
        return message

    def unpack(self, messages: Tensor) -> None:
        """Write the other processes' slices into the bucket. messages: (processes, length) bytes."""
        slices = self.bucket.weights.view(self.bucket.size, self.bucket.length)
        for rank, (weights, parts, sizes) in enumerate(zip(slices, self.parts, self.sizes, strict=True)):
            if rank == self.bucket.rank:
                continue
            found = messages[rank, : sum(sizes)].split(sizes)
            for (part, narrow), piece in zip(parts, found, strict=True):
                weights[part].copy_(piece.view(self.dtype if narrow else weights.dtype))
