"""A GPT as people build it today, with the architecture of Qwen3 (Yang et al. 2025, "Qwen3 Technical Report").

What differs from GPT-2: RMS norm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), normalised queries and
keys (Henry et al. 2020), grouped queries (Ainslie et al. 2023), SwiGLU (Shazeer 2020), and no biases. Parameters have
the names and shapes of `Qwen3ForCausalLM` in Hugging Face's `transformers`; without qk_norm, of `LlamaForCausalLM`, and
with qkv_bias, of `Qwen2ForCausalLM`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt.config.models import ModernModel
from mingpt.model.language import KVCache, LanguageModel, Shape, attention, document_mask, positions

Rotation = tuple[Tensor, Tensor]  # cosine and sine of each position's angles


@dataclass(frozen=True, kw_only=True)
class ModernConfig(Shape):
    """Sizes, and which of its architectures it is. ModernModel's keys of the same names say more."""

    # Heads of keys and values.
    n_kv_head: int
    head_dim: int
    # Width of the MLP.
    n_inner: int
    # Rotary positions: the base of their wavelengths, and by how much long ones are stretched after so many positions.
    rope_base: float
    rope_factor: float
    rope_original: int
    norm_eps: float
    qk_norm: bool
    qkv_bias: bool
    # The output has the embedding's weight.
    tied: bool

    @classmethod
    def of(cls, model: ModernModel, vocab_size: int) -> "ModernConfig":
        return cls(
            vocab_size,
            model.block_size,
            model.n_layer,
            model.n_head,
            model.n_embd,
            model.vocab_multiple,
            n_kv_head=model.kv_heads,
            head_dim=model.head_size,
            n_inner=model.inner_size,
            rope_base=model.rope_base,
            rope_factor=model.rope_factor,
            rope_original=model.rope_original,
            norm_eps=model.norm_eps,
            qk_norm=model.qk_norm,
            qkv_bias=model.qkv_bias,
            tied=model.tied,
        )


def linear(n_in: int, n_out: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(n_in, n_out, bias=bias)


class RMSNorm(nn.Module):
    """Divides by the root of the mean square. nn.RMSNorm's fused kernel needs weight and input of one type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.size,), self.weight.to(x.dtype), self.eps)


LOW, HIGH = 1.0, 4.0  # Llama 3.1's low_freq_factor and high_freq_factor


def rotation(positions: Tensor, config: ModernConfig) -> Rotation:
    """Rotary embedding: by which angles the queries and keys at `positions` turn, one for each pair of dimensions.

    With rope_factor, for texts longer than the rope_original positions of a first training, as in Llama 3.1
    (Grattafiori et al. 2024): wavelengths longer than those become rope_factor times as long, those below a quarter of
    them stay.
    """
    size = config.head_dim
    frequencies = config.rope_base ** (-torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size)
    if config.rope_factor != 1:
        turns = config.rope_original * frequencies / (2 * math.pi)  # within the first training's positions
        kept = ((turns - LOW) / (HIGH - LOW)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / config.rope_factor)
    angles = positions[..., None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Turn dimension i together with i + size / 2. x: (batch, head, time, size)."""
    cos, sin = (part.unsqueeze(-3).to(x.dtype) for part in by)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    """Causal self-attention. Each head of keys and values serves n_head / n_kv_head heads of queries."""

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.size = config.head_dim
        queries, keys = config.n_head * self.size, config.n_kv_head * self.size
        self.q_proj = linear(config.n_embd, queries, config.qkv_bias)
        self.k_proj = linear(config.n_embd, keys, config.qkv_bias)
        self.v_proj = linear(config.n_embd, keys, config.qkv_bias)
        self.o_proj = linear(queries, config.n_embd)
        self.q_norm = RMSNorm(self.size, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.size, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, by: Rotation, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        # The order of these three lines is that in which backward adds up the gradient of x: another has other bits.
        q = self.q_proj(x).unflatten(-1, (-1, self.size))
        k = self.k_proj(x).unflatten(-1, (-1, self.size))
        v = self.v_proj(x).unflatten(-1, (-1, self.size))
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        # Keys are cached turned: what a query sees of them depends on the distance alone.
        q, k = rotate(q, by), rotate(k, by)
        if cache:
            k, v = cache.append(k, v)
        return self.o_proj(attention(q, k, v, mask).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.gate_proj = linear(config.n_embd, config.n_inner)
        self.up_proj = linear(config.n_embd, config.n_inner)
        self.down_proj = linear(config.n_inner, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm: attention and MLP each read a normalised copy of the residual stream, and add to the stream."""

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, by: Rotation, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), by, cache, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """All layers but the output."""

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.n_embd, config.norm_eps)

    def forward(self, tokens: Tensor, caches: Sequence[KVCache] | None, documents: Tensor | None) -> Tensor:
        by = rotation(positions(tokens, caches, documents), self.config)
        x = self.embed_tokens(tokens)
        mask = None if documents is None else document_mask(documents)
        for i, layer in enumerate(self.layers):
            x = layer(x, by, caches[i] if caches else None, mask)
        return self.norm(x)


class Modern(LanguageModel):
    config: ModernConfig
    LAYER = "model.layers.0."

    def __init__(self, config: ModernConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tied:
            self.lm_head = linear(config.n_embd, config.padded_vocab_size)
        # Each layer begins as the identity, and an output of its own as a uniform guess, as in nanochat. A
        # shared one needs small rows, so that the first guesses are not far off.
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02 if config.tied else 1.0)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "_proj.bias")) or name == "lm_head.weight":
                nn.init.zeros_(parameter)

    def activations(
        self, tokens: Tensor, caches: Sequence[KVCache] | None = None, documents: Tensor | None = None
    ) -> Tensor:
        return self.model(tokens, caches, documents)

    def output_weight(self) -> Tensor:
        return self.model.embed_tokens.weight if self.config.tied else self.lm_head.weight
