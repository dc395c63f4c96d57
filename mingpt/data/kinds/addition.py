"""Sums of two numbers."""

from functools import partial
from string import digits
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mingpt.config.kinds import register
from mingpt.data.kinds.questions import QuestionData

if TYPE_CHECKING:
    from mingpt.data.source import Source
    from mingpt.data.vocabulary import Vocabulary


@register
class AdditionData(QuestionData):
    kind: Literal["addition"] = "addition"
    """sums, as 07+35=042"""
    digits: int = Field(default=2, ge=1, le=9)
    """Digits of each of the two numbers; the sum has one more."""
    reverse: bool = False
    """Write the sum from its last digit to its first, 07+35=240: the order in which carrying finds them."""

    @property
    def questions(self) -> int:
        return 10 ** (2 * self.digits)

    @property
    def length(self) -> int:
        return 3 * self.digits + 2

    def open(self, block_size: int, micro_size: int, vocabulary: "Vocabulary | None" = None) -> "Source":
        from mingpt.data.synthetic import addition, open_questions

        return open_questions(
            self, partial(addition, self.digits, self.reverse), digits + "+=", block_size, micro_size, vocabulary
        )
