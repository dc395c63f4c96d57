"""All that GPT-2 and the modern model share: the loss, and the keys and values that generation keeps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

IGNORE = -100  # a target that is left out of the loss, as in torch and Hugging Face


@dataclass(frozen=True)
class Shape:
    """A language model's sizes."""

    vocab_size: int
    # Positions that it sees at a time.
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    # The embedding's rows are padded to a multiple of it; 64 suits GPUs.
    vocab_multiple: int = 1

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple


class KVCache:
    """The keys and values of one layer for the positions so far."""

    def __init__(self, capacity: int) -> None:
        # The largest number of positions: memory is taken once, and no key is copied when the next one comes.
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of the next positions, shape (batch, head, time, size). Returns all so far."""
        batch, heads, time, size = keys.shape
        if self.keys is None or self.values is None:
            self.keys = keys.new_empty(batch, heads, self.capacity, size)
            self.values = torch.empty_like(self.keys)
        start = self.length
        self.length += time
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


def document_mask(documents: Tensor) -> Tensor:
    """Say where a query (the third dimension) may look: (batch, 1, time, time) bool. documents: (batch, time) int64."""
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
    """Position t attends to the positions 0 to t; with a mask, to what that says.

    q: (batch, head, time, size); k, v: the same, or with fewer heads, each for several heads of q (grouped queries).
    If q is shorter than k, it holds the last position.
    """
    shared = q.shape[1] // k.shape[1]
    if shared > 1 and q.is_cuda and (mask is not None or q.dtype == torch.float32 or before_ampere(q.device)):
        # torch's memory-efficient kernel takes no grouped queries, and without it all scores would be in memory. Flash
        # attention does, from Ampere on.
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None and k.shape[2] == q.shape[2],  # otherwise q attends to all
        dropout_p=dropout,
        enable_gqa=k.shape[1] != q.shape[1],
    )


def before_ampere(device: torch.device) -> bool:
    return torch.cuda.get_device_properties(device).major < 8  # which torch's compiler takes for a constant


def positions(tokens: Tensor, caches: Sequence[KVCache] | None, documents: Tensor | None) -> Tensor:
    """Each token's position: in its sequence, shape (time,), or with `documents` in its document, (batch, time)."""
    start = caches[0].length if caches else 0
    inside = torch.arange(start, start + tokens.shape[1], device=tokens.device)
    if documents is None:
        return inside
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    # The last beginning so far, by a running maximum: no loop over documents, whose number differs by sample.
    return inside - (inside * first).cummax(1).values


class LanguageModel(nn.Module):
    """Predicts the next token. A subclass says what the activations are, and which weight the output layer has."""

    config: Shape
    # The prefix of layer 0's parameter names, such as `transformer.h.0.`. Below it, matrices are for linear layers
    # only, unless `linear_matrices` says otherwise.
    LAYER: str

    def __init__(self) -> None:
        super().__init__()
        self.prepare_loss(False, 0)

    def prepare_loss(self, compiled: bool, rows: int) -> None:
        """compiled: by torch's compiler, when the loss is first called.

        rows: the positions whose logits are in memory at a time; 0: all.
        """
        self.loss_rows = rows
        # dynamic=False: at a second shape torch would compile kernels for any shape, and an attempt that begins with
        # that shape would have others.
        self.compiled_loss = torch.compile(self.loss_alone, dynamic=False) if compiled else None

    def activations(
        self, tokens: Tensor, caches: Sequence[KVCache] | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """All layers but the output: tokens (batch, time) to (batch, time, n_embd).

        caches: one per layer. With them, `tokens` are the first positions of the text, or the one next position.
        documents: (batch, time) int64, the number of each token's document, which sees nothing of the others.
        """
        raise NotImplementedError

    def blocks(self) -> nn.ModuleList:
        """Its layers: LAYER without the number."""
        blocks = self.get_submodule(self.LAYER.removesuffix(".0."))
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def linear_matrices(self) -> set[str]:
        """The parameters that nothing reads but linear layers: the layers' matrices. Not the embedding.

        It is a contract: under precision=bf16 or fp16, a process has of other processes' slices of these only what
        autocast rounds them to (compute/exchange.py). A model that reads such a matrix in float32 (a lookup, a router's
        scores) must leave it out here: otherwise bits depend on the world, and nothing reports that.
        tests/compute/test_in_16_bits.py holds it for the models of this package.
        """
        layers = self.LAYER.removesuffix("0.")
        return {name for name, p in self.named_parameters() if name.startswith(layers) and p.dim() == 2}

    def output_weight(self) -> Tensor:
        """Shape (padded_vocab_size, n_embd)."""
        raise NotImplementedError

    def forward(
        self, tokens: Tensor, targets: Tensor, weights: Tensor | None = None, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of `targets` (batch, time) given `tokens` (batch, time), both int64.

        weights: (batch, time) float32, the weight of each target; None: 1 each. documents: see `activations`.
        Returns (sum of the losses in nats, number of targets or sum of their weights), float32 scalars. Sums, not
        means: microbatches may have different numbers of targets (IGNORE), and sums add up to the right mean.
        """
        activations = self.activations(tokens, None, documents)
        if self.loss_rows:
            return self.loss_in_pieces(self.loss_rows, activations, targets, weights)
        return (self.compiled_loss or self.loss_alone)(activations, targets, weights)

    def loss_and_logits(
        self, tokens: Tensor, targets: Tensor, weights: Tensor | None = None, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what `forward` returns, and the logits (batch, time, padded_vocab_size), float32."""
        return self.loss_of(self.activations(tokens, None, documents), targets, weights)

    def loss_of(self, activations: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """`loss_and_logits`, from the activations on: also of a part of the positions (`loss_in_pieces`)."""
        logits = self.padded_logits(activations)
        if self.config.padded_vocab_size > self.config.vocab_size:
            # exp(-inf) = 0: the padding is never predicted and gets no gradient.
            if torch.compiler.is_compiling():
                # Computed again in backward, as all else that follows the matrix product: what is kept for it is that
                # product, in 16 bits under autocast. An assignment to a part would not be, and keep float32 logits.
                padding = torch.arange(self.config.padded_vocab_size, device=logits.device) >= self.config.vocab_size
                logits = logits.masked_fill(padding, -torch.inf)
            else:  # in place: no copy of them
                logits[..., self.config.vocab_size :] = -torch.inf
        rows, flat = logits.flatten(0, 1), targets.flatten()
        if weights is None:
            loss = F.cross_entropy(rows, flat, ignore_index=IGNORE, reduction="sum")
            return loss, (targets != IGNORE).sum().float(), logits
        losses = F.cross_entropy(rows, flat, ignore_index=IGNORE, reduction="none")
        return (losses * weights.flatten()).sum(), (weights * (targets != IGNORE)).sum(), logits

    def loss_alone(self, activations: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """`loss_of` without the logits, for training.

        What a compiled function returns is in memory: 4 bytes a logit are written, and in backward as many zeros, their
        gradient, are written and read. What it does not return stays in registers.
        """
        return self.loss_of(activations, targets, weights)[:2]

    def loss_in_pieces(
        self, rows: int, activations: Tensor, targets: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns what `forward` returns, up to rounding. rows: positions (of batch x time) in a piece.

        Each piece's logits are freed in the forward pass, and computed again in backward. Pieces are added in their
        order.
        """

        def piece(activations: Tensor, targets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
            kind = activations.device.type
            dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
            # Each piece casts the weight itself. A cast that all share would add up their gradients in half precision.
            with torch.autocast(kind, dtype, enabled, cache_enabled=False):
                return (self.compiled_loss or self.loss_alone)(activations, targets, weights)

        def cut(x: Tensor) -> Sequence[Tensor]:
            """(batch, time, …) to pieces of shape (1, rows, …)."""
            return x.flatten(0, 1)[None].split(rows, 1)

        target_pieces = cut(targets)
        weight_pieces = [None] * len(target_pieces) if weights is None else cut(weights)
        losses, counts = list[Tensor](), list[Tensor]()
        for tensors in zip(cut(activations), target_pieces, weight_pieces, strict=True):
            if torch.is_grad_enabled():
                # No random number is drawn in a loss, and to store the generator's state would wait for the device.
                loss, count = checkpoint(piece, *tensors, use_reentrant=False, preserve_rng_state=False)
            else:
                loss, count = piece(*tensors)
            losses.append(loss)
            counts.append(count)
        # Left to right: the number of pieces is a setting, which affects the result.
        return reduce(torch.add, losses), reduce(torch.add, counts)

    def padded_logits(self, activations: Tensor) -> Tensor:
        return F.linear(activations, self.output_weight()).float()

    def logits(self, tokens: Tensor, caches: Sequence[KVCache] | None = None) -> Tensor:
        """The next token's logits at each position: (batch, time) to (batch, time, vocab_size), without the padding."""
        return self.padded_logits(self.activations(tokens, caches))[..., : self.config.vocab_size]
