"""What the kinds of language models have in common."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from mingpt.config.kinds import Model
from mingpt.config.section import NO_RESULT
from mingpt.errors import UserError

if TYPE_CHECKING:
    from mingpt.config.schema import Config
    from mingpt.model.language import LanguageModel


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
    """Start with these weights: a folder with such a model's config.json and model.safetensors, any fsspec URL."""

    def problem(self, config: "Config") -> str | None:
        return self.impossible_shape()

    def impossible_shape(self) -> str | None:
        """What in the shape itself can't be, and what to do; None: nothing."""
        raise NotImplementedError

    def make(self, vocab_size: int) -> "LanguageModel":
        """The model over a vocabulary of at least one token."""
        raise NotImplementedError

    def build(self, vocab_size: int) -> "LanguageModel":
        if not vocab_size:
            raise UserError("the data has no tokens, and a GPT needs some: choose other data, or name a model._target_")
        return self.make(vocab_size)
