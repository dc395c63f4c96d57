"""GPT-2: the architecture of the published checkpoints (Radford et al. 2019, "Language Models are Unsupervised
Multitask Learners").

Parameters have the names and shapes of `GPT2LMHeadModel` in Hugging Face's `transformers`, which can therefore load a
snapshot's model part as it is. This file imports torch and nothing of the project.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORE = -100  # a target that is left out of the loss, as in torch and Hugging Face


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. vocab_multiple: the embedding's rows are padded to a multiple of it; 64 suits GPUs."""

    vocab_size: int
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float = 0.0
    vocab_multiple: int = 1

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple


class Conv1D(nn.Module):
    """A linear layer whose weight has shape (in, out), as in GPT-2's checkpoints; `nn.Linear` has (out, in)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class KVCache:
    """The keys and values of one layer for the positions so far. capacity: the largest number of positions."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of the next positions, shape (batch, head, time, size). Returns all so far."""
        batch, heads, time, size = keys.shape
        if self.keys is None or self.values is None:
            self.keys, self.values = (keys.new_empty(batch, heads, self.capacity, size) for _ in range(2))
        start, self.length = self.length, self.length + time
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


class Attention(nn.Module):
    """Causal multi-head self-attention: position t attends to the positions 0 to t."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = Conv1D(config.n_embd, 3 * config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.c_attn(x).view(batch, time, 3, self.n_head, width // self.n_head).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache:
            k, v = cache.append(k, v)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=k.shape[2] == time,  # otherwise q is the newest position only, which attends to all
            dropout_p=self.dropout if self.training else 0.0,
        )
        y = self.c_proj(y.transpose(1, 2).reshape(batch, time, width))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = Conv1D(config.n_embd, 4 * config.n_embd)
        self.c_proj = Conv1D(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        y = self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))
        return F.dropout(y, self.dropout, self.training)


class Block(nn.Module):
    """Pre-norm: attention and MLP each read a normalised copy of the residual stream, and add to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """All layers but the output: tokens (batch, time) to activations (batch, time, n_embd)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)

    def forward(self, tokens: Tensor, caches: Sequence[KVCache] | None = None) -> Tensor:
        """caches: one per layer. With them, `tokens` are the first positions of the text, or the one next position."""
        start = caches[0].length if caches else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = F.dropout(self.wte(tokens) + self.wpe(positions), self.dropout, self.training)
        for i, block in enumerate(self.h):
            x = block(x, caches[i] if caches else None)
        return self.ln_f(x)


class GPT(nn.Module):
    """A language model. The output layer shares its weight with the token embedding (tied)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = Transformer(config)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                # Keeps the variance of the residual stream through its 2 * n_layer additions (GPT-2).
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))
            elif parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cross-entropy of `targets` (batch, time) given `tokens` (batch, time), both int64.

        weights: (batch, time) float32, the weight of each target; None: 1 each.
        Returns (sum of the losses in nats, number of targets or sum of their weights), float32 scalars. Sums, not
        means: microbatches may have different numbers of targets (IGNORE), and sums add up to the right mean.
        """
        loss, count, _ = self.loss_and_logits(tokens, targets, weights)
        return loss, count

    def loss_and_logits(
        self, tokens: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `forward` returns, and the logits (batch, time, padded_vocab_size), float32."""
        logits = self.padded_logits(self.transformer(tokens))
        if self.config.padded_vocab_size > self.config.vocab_size:
            # exp(-inf) = 0: the padding is never predicted and gets no gradient.
            logits[..., self.config.vocab_size :] = -torch.inf
        rows, flat = logits.flatten(0, 1), targets.flatten()
        if weights is None:
            loss = F.cross_entropy(rows, flat, ignore_index=IGNORE, reduction="sum")
            return loss, (targets != IGNORE).sum().float(), logits
        losses = F.cross_entropy(rows, flat, ignore_index=IGNORE, reduction="none")
        return (losses * weights.flatten()).sum(), (weights * (targets != IGNORE)).sum(), logits

    def padded_logits(self, activations: Tensor) -> Tensor:
        return F.linear(activations, self.transformer.wte.weight).float()

    def logits(self, tokens: Tensor, caches: Sequence[KVCache] | None = None) -> Tensor:
        """The next token's logits at each position: (batch, time) to (batch, time, vocab_size), without the padding."""
        return self.padded_logits(self.transformer(tokens, caches))[..., : self.config.vocab_size]
