"""Letters to put in order."""

from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mingpt.config.kinds import register
from mingpt.data.kinds.questions import QuestionData

if TYPE_CHECKING:
    from mingpt.data.source import Source
    from mingpt.data.vocabulary import Vocabulary


@register
class SortData(QuestionData):
    kind: Literal["sort"] = "sort"
    """letters to put in order, as 3120=0123"""
    letters: int = Field(default=8, ge=1, le=64)
    """How many letters a question has."""
    alphabet: int = Field(default=10, ge=2, le=62)
    """How many different letters there are: 0 to 9, A to Z, a to z."""

    @property
    def questions(self) -> int:
        return int(self.alphabet**self.letters)

    @property
    def length(self) -> int:
        return 2 * self.letters

    def open(self, block_size: int, micro_size: int, vocabulary: "Vocabulary | None" = None) -> "Source":
        from mingpt.data.synthetic import ALPHABET, open_questions, sorting

        ask = partial(sorting, self.letters, self.alphabet)
        return open_questions(self, ask, ALPHABET[: self.alphabet] + "=", block_size, micro_size, vocabulary)
