"""A command line's config, or what is wrong with it."""

import pytest

from mingpt.compose import compose
from mingpt.config.schema import Config
from mingpt.errors import UserError


def configured(*arguments: str, world_size: int = 1) -> Config:
    config = compose.configure(arguments, world_size)
    assert config is not None
    return config


def problems(*arguments: str, world_size: int = 1) -> list[str]:
    with pytest.raises(UserError) as mistake:
        compose.configure(arguments, world_size)
    return list(mistake.value.problems)
