"""Data of one's own: what `data._target_` gives."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from mingpt.config.kinds import Data, register
from mingpt.config.section import NO_RESULT, Own

if TYPE_CHECKING:
    from mingpt.data.source import Source
    from mingpt.data.vocabulary import Vocabulary


@register
class OwnData(Data, Own):
    kind: Literal["own"] = "own"
    """data of one's own; its other keys are its arguments"""
    target: str = Field(default="", alias="_target_")
    """A function, package.module.name, that gives the mingpt.data.source.Source."""
    path: Annotated[str | None, NO_RESULT] = None
    """Where its files are, if it has an argument of this name. What is in them counts, not where they lie."""

    @property
    def arguments(self) -> dict[str, Any]:
        return super().arguments | ({} if self.path is None else {"path": self.path})

    def open(self, block_size: int, micro_size: int, vocabulary: "Vocabulary | None" = None) -> "Source":
        from mingpt.data.own import open_own

        return open_own(self, block_size, micro_size)
