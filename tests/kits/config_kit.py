"""A command line's config, or what is wrong with it."""

import pytest

from mingpt.compose import compose
from mingpt.config.schema import Config
from mingpt.errors import UserError


def configured(*arguments: str, world_size: int = 1) -> Config:
    """The config of a command line that is right."""
    return compose.configure(arguments, world_size)


def problems(*arguments: str, world_size: int = 1) -> list[str]:
    """All that is wrong with a command line, a text for each mistake."""
    with pytest.raises(UserError) as mistake:
        compose.configure(arguments, world_size)
    return list(mistake.value.problems)
