"""A GPT of today."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mingpt.config.kinds import register
from mingpt.model.kinds.language import Language

if TYPE_CHECKING:
    from mingpt.model.modern import Modern, ModernConfig


@register
class ModernModel(Language):
    kind: Literal["modern"] = "modern"
    """a GPT of today: rotary positions, RMS norm, SwiGLU, grouped queries, as in Qwen3 and Llama"""
    n_kv_head: int | None = Field(default=None, ge=1)
    """Heads of keys and values, which the attention heads share; they divide n_head. null: as many."""
    head_dim: int | None = Field(default=None, ge=2)
    """Width of a head, even. null: n_embd / n_head."""
    n_inner: int | None = Field(default=None, ge=1)
    """Width of the MLP. null: 8/3 of n_embd, rounded up to a multiple of 8, so that it has the weights of GPT-2's."""
    rope_base: float = Field(default=10000.0, gt=1)
    """Base of the rotary positions' wavelengths; longer texts want a larger one."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Added to the mean square in the norms."""
    qk_norm: bool = True
    """Normalise queries and keys, as Qwen3 does; Llama does not."""
    tied: bool = False
    """The output layer shares the embedding's weight."""

    reads = ("model.n_head", "model.n_kv_head", "model.n_embd", "model.head_dim")

    def impossible_shape(self) -> str | None:
        if self.head_dim is None and self.n_embd % self.n_head:
            return f"model.n_head={self.n_head} does not divide model.n_embd={self.n_embd}: set model.head_dim"
        if (size := self.head_dim or self.n_embd // self.n_head) % 2:
            return f"model.head_dim={size} is odd, and rotary positions turn pairs of dimensions: choose an even one"
        if self.n_kv_head and self.n_head % self.n_kv_head:
            return f"model.n_kv_head={self.n_kv_head} does not divide model.n_head={self.n_head}: choose a divisor"
        return None

    def shape(self, vocab_size: int) -> "ModernConfig":
        from mingpt.model.modern import ModernConfig

        return ModernConfig(
            vocab_size,
            self.block_size,
            self.n_layer,
            self.n_head,
            self.n_embd,
            self.vocab_multiple,
            n_kv_head=self.n_kv_head or self.n_head,
            head_dim=self.head_dim or self.n_embd // self.n_head,
            n_inner=self.n_inner or -(-8 * self.n_embd // 24) * 8,
            rope_base=self.rope_base,
            norm_eps=self.norm_eps,
            qk_norm=self.qk_norm,
            tied=self.tied,
        )

    def make(self, vocab_size: int) -> "Modern":
        from mingpt.model.modern import Modern

        return Modern(self.shape(vocab_size))

    def parameters(self, vocabulary: int) -> int:
        c = self.shape(vocabulary)
        heads = 2 * c.head_dim * (c.n_head + c.n_kv_head)
        layer = c.n_embd * (heads + 3 * c.n_inner + 2) + (2 * c.head_dim if c.qk_norm else 0)
        return (1 if c.tied else 2) * vocabulary * c.n_embd + c.n_layer * layer + c.n_embd
