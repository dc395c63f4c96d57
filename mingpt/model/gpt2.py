"""GPT-2, as published (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners").

Parameters have the names and shapes of `GPT2LMHeadModel` in Hugging Face's `transformers`: an export changes neither.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt.config.models import GPTModel
from mingpt.model.language import KVCache, LanguageModel, Shape, attention, document_mask, positions


@dataclass(frozen=True)
class GPTConfig(Shape):
    dropout: float = 0.0

    @classmethod
    def of(cls, model: GPTModel, vocab_size: int) -> "GPTConfig":
        return cls(vocab_size, **model.model_dump(include={f.name for f in fields(cls)}))


class Conv1D(nn.Module):
    """A linear layer whose weight has shape (in, out), as in GPT-2's checkpoints; `nn.Linear` has (out, in)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    """Causal multi-head self-attention: position t attends to the positions 0 to t."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        # Queries, keys and values in one matrix, as in the checkpoints.
        self.c_attn = Conv1D(config.n_embd, 3 * config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)

    def forward(self, x: Tensor, cache: KVCache | None = None, mask: Tensor | None = None) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.c_attn(x).view(batch, time, 3, self.n_head, width // self.n_head).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache:
            k, v = cache.append(k, v)
        y = attention(q, k, v, mask, self.dropout if self.training else 0.0)
        y = self.c_proj(y.transpose(1, 2).reshape(batch, time, width))
        return F.dropout(y, self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = Conv1D(config.n_embd, 4 * config.n_embd)
        self.c_proj = Conv1D(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        # GPT-2 was trained with this approximation. With erf a step is 3 % faster on a CPU, and published weights have
        # other logits.
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

    def forward(self, x: Tensor, cache: KVCache | None = None, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache, mask)
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

    def forward(
        self, tokens: Tensor, caches: Sequence[KVCache] | None = None, documents: Tensor | None = None
    ) -> Tensor:
        x = self.wte(tokens) + self.wpe(positions(tokens, caches, documents))
        x = F.dropout(x, self.dropout, self.training)
        mask = None if documents is None else document_mask(documents)
        for i, block in enumerate(self.h):
            x = block(x, caches[i] if caches else None, mask)
        return self.ln_f(x)


class GPT(LanguageModel):
    """A language model. The output layer shares its weight with the token embedding (tied)."""

    config: GPTConfig
    LAYER = "transformer.h.0."

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

    def activations(
        self, tokens: Tensor, caches: Sequence[KVCache] | None = None, documents: Tensor | None = None
    ) -> Tensor:
        return self.transformer(tokens, caches, documents)

    def output_weight(self) -> Tensor:
        return self.transformer.wte.weight
