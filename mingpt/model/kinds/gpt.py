"""GPT-2, of any size."""

from dataclasses import fields
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mingpt.config.kinds import register
from mingpt.model.kinds.language import Language

if TYPE_CHECKING:
    from mingpt.model.gpt2 import GPT, GPTConfig


@register
class GPTModel(Language):
    kind: Literal["gpt"] = "gpt"
    """a GPT-2 of any size"""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of activations dropped in training."""

    reads = ("model.n_head", "model.n_embd")

    def impossible_shape(self) -> str | None:
        if self.n_embd % self.n_head:
            return f"model.n_head={self.n_head} does not divide model.n_embd={self.n_embd}: choose a divisor"
        return None

    def shape(self, vocab_size: int) -> "GPTConfig":
        from mingpt.model.gpt2 import GPTConfig

        return GPTConfig(vocab_size, **self.model_dump(include={f.name for f in fields(GPTConfig)}))

    def make(self, vocab_size: int) -> "GPT":
        from mingpt.model.gpt2 import GPT

        return GPT(self.shape(vocab_size))

    def parameters(self, vocabulary: int) -> int:
        blocks = self.n_layer * (12 * self.n_embd**2 + 13 * self.n_embd)
        return (vocabulary + self.block_size + 2) * self.n_embd + blocks
