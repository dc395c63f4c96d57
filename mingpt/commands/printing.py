"""`mingpt train --help`, `--cfg` and the like: answered by Hydra; nothing is trained."""

from mingpt.config.compose import configure
from mingpt.errors import FINISHED


def printing(arguments: list[str]) -> int:
    """Print what was asked for. Raises UserError."""
    configure(arguments)
    return FINISHED
