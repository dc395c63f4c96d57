"""GPT-2, of any size."""

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from mingpt.config.kinds import Model, register
from mingpt.config.section import NO_RESULT
from mingpt.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from mingpt.config.schema import Config
    from mingpt.model.gpt2 import GPTConfig


@register
class GPTModel(Model):
    kind: Literal["gpt"] = "gpt"
    """a GPT-2 of any size"""
    n_layer: int = Field(default=4, ge=1)
    """Transformer blocks."""
    n_head: int = Field(default=4, ge=1)
    """Attention heads; they divide n_embd."""
    n_embd: int = Field(default=128, ge=1)
    """Width."""
    block_size: int = Field(default=64, ge=1)
    """Tokens that the model sees at a time."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of activations dropped in training."""
    vocab_multiple: int = Field(default=1, ge=1)
    """Pad the embedding to a multiple of this; 64 is faster on GPUs."""
    init_from: Annotated[str | None, NO_RESULT] = Field(default=None, min_length=1)
    """Start with these weights: a folder with a GPT-2's config.json and model.safetensors, any fsspec URL."""

    reads = ("model.n_head", "model.n_embd")

    def problem(self, config: "Config") -> str | None:
        if self.n_embd % self.n_head:
            return f"model.n_head={self.n_head} does not divide model.n_embd={self.n_embd}: choose a divisor"
        return None

    def shape(self, vocab_size: int) -> "GPTConfig":
        from mingpt.model.gpt2 import GPTConfig

        return GPTConfig(vocab_size, **self.model_dump(include={f.name for f in fields(GPTConfig)}))

    def build(self, vocab_size: int) -> "nn.Module":
        from mingpt.model.gpt2 import GPT

        if not vocab_size:
            raise UserError("the data has no tokens, and a GPT needs some: choose other data, or name a model._target_")
        return GPT(self.shape(vocab_size))

    def parameters(self, vocabulary: int) -> int:
        blocks = self.n_layer * (12 * self.n_embd**2 + 13 * self.n_embd)
        return (vocabulary + self.block_size + 2) * self.n_embd + blocks
