"""The kinds of models: each one's section of the config. `model/building.py` makes the module of it."""

from typing import Annotated, Literal

from pydantic import Field

from mingpt.config.kinds import Model
from mingpt.config.section import NO_RESULT, Own


class Language(Model):
    n_layer: int = Field(default=4, ge=1)
    """Transformer blocks."""
    n_head: int = Field(default=4, ge=1)
    """Attention heads."""
    n_embd: int = Field(default=128, ge=1)
    """Width."""
    block_size: int = Field(default=64, ge=1)
    """Tokens that the model sees at a time."""
    vocab_multiple: int = Field(default=1, ge=1)
    """Pad the embedding to a multiple of this; 64 is faster on GPUs."""
    init_from: Annotated[str | None, NO_RESULT] = Field(default=None, min_length=1)
    """Start with these weights: the hub's OWNER/NAME, or a folder with config.json and model.safetensors, any URL."""


class GPTModel(Language):
    kind: Literal["gpt"] = "gpt"
    """a GPT-2 of any size"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of activations dropped in training."""

    reads = ("model.n_head", "model.n_embd")

    def problem(self) -> str | None:
        if self.n_embd % self.n_head:
            return f"model.n_head={self.n_head} does not divide model.n_embd={self.n_embd}: choose a divisor"
        return None

    def parameters(self, vocabulary: int) -> int:
        blocks = self.n_layer * (12 * self.n_embd**2 + 13 * self.n_embd)
        return (vocabulary + self.block_size + 2) * self.n_embd + blocks


class ModernModel(Language):
    kind: Literal["modern"] = "modern"
    """a GPT of today: rotary positions, RMS norm, SwiGLU, grouped queries, as in Qwen and Llama"""
    n_kv_head: int | None = Field(default=None, ge=1)
    """Heads of keys and values, which the attention heads share; they divide n_head. null: as many."""
    head_dim: int | None = Field(default=None, ge=2)
    """Width of a head, even. null: n_embd / n_head."""
    n_inner: int | None = Field(default=None, ge=1)
    """Width of the MLP. null: 8/3 of n_embd, rounded up to a multiple of 8, so that it has the weights of GPT-2's."""
    rope_base: float = Field(default=10000.0, gt=1)
    """Base of the rotary positions' wavelengths; longer texts want a larger one."""
    rope_factor: float = Field(default=1.0, ge=1)
    """How much longer texts may be than rope_original: long wavelengths are stretched so. Llama 3.1: 8; 3.2: 32."""
    rope_original: int = Field(default=8192, ge=1)
    """Positions of the training before, with rope_factor."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Added to the mean square in the norms."""
    qk_norm: bool = True
    """Normalise queries and keys, as Qwen3 does; Llama and Qwen2 do not."""
    qkv_bias: bool = False
    """Biases of queries, keys and values, as Qwen2 has; without qk_norm."""
    tied: bool = False
    """The output layer shares the embedding's weight."""

    reads = ("model.n_head", "model.n_kv_head", "model.n_embd", "model.head_dim")

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_size(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def inner_size(self) -> int:
        return self.n_inner or -(-8 * self.n_embd // 24) * 8

    def problem(self) -> str | None:
        if self.head_dim is None and self.n_embd % self.n_head:
            return f"model.n_head={self.n_head} does not divide model.n_embd={self.n_embd}: set model.head_dim"
        if self.head_size % 2:
            return (
                f"model.head_dim={self.head_size} is odd, and rotary positions turn pairs of dimensions: choose an "
                "even one"
            )
        if self.n_head % self.kv_heads:
            return f"model.n_kv_head={self.n_kv_head} does not divide model.n_head={self.n_head}: choose a divisor"
        if self.qkv_bias and self.qk_norm:
            return "model.qkv_bias=true is Qwen2's, which has no norm of queries and keys: set model.qk_norm=false"
        return None

    def parameters(self, vocabulary: int) -> int:
        heads = 2 * self.head_size * (self.n_head + self.kv_heads)
        layer = self.n_embd * (heads + 3 * self.inner_size + 2)
        if self.qk_norm:
            layer += 2 * self.head_size
        if self.qkv_bias:
            layer += self.head_size * (self.n_head + 2 * self.kv_heads)
        embeddings = 1 if self.tied else 2
        return embeddings * vocabulary * self.n_embd + self.n_layer * layer + self.n_embd


class OwnModel(Model, Own):
    kind: Literal["own"] = "own"
    """a module of one's own; its other keys are its arguments"""
    target: str = Field(default="", alias="_target_")
    """A class or function, package.module.Name, that gives the torch module."""
    block_size: int = Field(default=1, ge=1)
    """Tokens in a sample of data that is cut into samples; an argument, too, if there is one of this name."""
