"""What messages about data say: the command that brings what is missing, and nothing that moves a terminal's cursor."""

from collections.abc import Iterator
from contextlib import contextmanager

from mingpt.errors import Mistake


@contextmanager
def told_how_to_fetch(path: str) -> Iterator[None]:
    """Add to a Mistake about a `path` where nothing is, and that mingpt.data.fetch can make, how it is made."""
    try:
        yield
    except Mistake as mistake:
        from mingpt.data.fetch import command_for  # brings Hydra, which processes that encode do without

        if not (command := command_for(path)):
            raise
        raise Mistake(f"{mistake}{command}") from mistake


def printable(text: str) -> str:
    """Text of others for a terminal: no line ends, no codes that move its cursor."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
