"""A language model's loss with the logits of a few positions in memory at a time (train.loss_rows)."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mingpt.model.language import LanguageModel


def loss_in_pieces(
    model: LanguageModel,
    rows: int,
    tokens: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `model.forward` returns, up to rounding. rows: positions (of batch x time) in a piece.

    Each piece's logits are freed in the forward pass, and computed again in backward. Pieces are added in their order.
    """

    def piece(activations: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        kind = activations.device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        # Each piece casts the weight itself. A cast that all share would add up their gradients in half precision.
        with torch.autocast(kind, dtype, enabled, cache_enabled=False):
            return model.loss_of(activations, targets, weights)[:2]

    def cut(x: Tensor) -> Sequence[Tensor]:
        """(batch, time, …) to pieces of shape (1, rows, …)."""
        return x.flatten(0, 1)[None].split(rows, 1)

    pieces = cut(model.activations(tokens, None, documents)), cut(targets)
    weighted = [None] * len(pieces[1]) if weights is None else cut(weights)
    sums = [
        checkpoint(piece, *tensors, use_reentrant=False, preserve_rng_state=False)
        if torch.is_grad_enabled()
        else piece(*tensors)
        for tensors in zip(*pieces, weighted, strict=True)
    ]
    losses, counts = zip(*sums, strict=True)
    return reduce(torch.add, losses), reduce(torch.add, counts)
