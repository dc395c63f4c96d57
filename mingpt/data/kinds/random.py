"""Random tokens, without a file."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mingpt.config.kinds import Data, register

if TYPE_CHECKING:
    from mingpt.data.source import Source
    from mingpt.data.vocabulary import Vocabulary


@register
class RandomData(Data):
    kind: Literal["random"] = "random"
    """random tokens without a file, to measure speed with"""
    vocabulary: int = Field(default=50257, ge=2, le=2**24)
    """How many different tokens there are."""
    samples: int = Field(default=1_000_000, ge=1)
    """How many samples, of model.block_size tokens each."""

    def open(self, block_size: int, micro_size: int, vocabulary: "Vocabulary | None" = None) -> "Source":
        from mingpt.data.synthetic import open_random

        return open_random(self, block_size, vocabulary)

    def vocabulary_size(self) -> int:
        return self.vocabulary
