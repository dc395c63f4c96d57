"""A command line's config, or what is wrong with it."""

import pytest

from mingpt.config import compose
from mingpt.config.schema import Config
from mingpt.errors import UserError


def configured(*arguments: str) -> Config:
    config = compose.configure(arguments)
    assert config is not None
    return config


def problems(*arguments: str) -> list[str]:
    with pytest.raises(UserError) as mistake:
        compose.configure(arguments)
    return list(mistake.value.problems)
