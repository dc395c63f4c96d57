"""What kinds of data have that are questions, made and not read."""

from typing import TYPE_CHECKING

from pydantic import Field

from mingpt.config.kinds import Data

if TYPE_CHECKING:
    from mingpt.config.schema import Config

MOST_QUESTIONS = 2**62  # their numbers are 64-bit integers


class QuestionData(Data):
    """Questions that are made, not read. Each kind says how many there are and how many tokens one takes."""

    val_samples: int = Field(default=1000, ge=0)
    """Questions that are kept for validation; training never asks them."""

    reads = ("data.val_samples", "data.digits", "data.letters", "data.alphabet", "model.block_size")

    @property
    def questions(self) -> int:
        """How many different questions there are."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """The tokens that the model sees of a question with its answer: all but the last."""
        raise NotImplementedError

    def problem(self, config: "Config") -> str | None:
        if self.questions > MOST_QUESTIONS:
            return (
                f"data.alphabet and data.letters make {self.questions:.0e} questions, more than {MOST_QUESTIONS:.0e}: "
                f"lower one of them"
            )
        if self.val_samples >= self.questions:
            return (
                f"data.val_samples={self.val_samples} of {self.questions} questions leaves none to train on: lower it"
            )
        if self.length > config.model.block_size:
            return (
                f"model.block_size={config.model.block_size}, but a question of data.kind={self.kind} takes "
                f"{self.length} tokens: set model.block_size={self.length}"
            )
        return None

    def vocabulary_size(self) -> int:
        return 100
