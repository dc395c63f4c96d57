"""A module of one's own: what `model._target_` gives."""

from typing import Literal

from pydantic import Field
from torch import nn

from mingpt.config import plugin
from mingpt.config.kinds import Model, register
from mingpt.config.section import Own


@register
class OwnModel(Model, Own):
    kind: Literal["own"] = "own"
    """a module of one's own; its other keys are its arguments"""
    target: str = Field(default="", alias="_target_")
    """A class or function, package.module.Name, that gives the torch module."""
    block_size: int = Field(default=1, ge=1)
    """Tokens in a sample of data that is cut into samples; an argument, too, if there is one of this name."""

    def build(self, vocab_size: int) -> nn.Module:
        made: nn.Module = plugin.call("model", self, vocab_size=vocab_size, block_size=self.block_size)
        return made

    def code(self) -> tuple[str | None, str | None]:
        return plugin.code("model", self)
