"""`mingpt train --help`, `--cfg` and the like: answered by Hydra; nothing is trained."""

from mingpt.command import command
from mingpt.config.compose import configure
from mingpt.errors import FINISHED


@command()
def main(arguments: list[str]) -> int:
    configure(arguments)
    return FINISHED
