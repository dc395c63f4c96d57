"""`python -m mingpt.launch.newest [overrides]`: the step of the run's newest snapshot; 0 if there is none.

For recipes/slurm/job.py. The launcher asks the same after each attempt, by which it sees whether the run goes on.
"""

import sys
import threading
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from mingpt.cli.command import code_of
from mingpt.cli.console import say
from mingpt.cli.parsers import parse
from mingpt.compose import compose
from mingpt.compose.commandline import given
from mingpt.config.schema import Config
from mingpt.errors import FINISHED


class Newest(NamedTuple):
    """The newest snapshot that this node knows of."""

    # 0: there is none.
    step: int
    # The host whose disk has the run, as this node's marker says; "": the run is here, or in a place that all see.
    host: str = ""


def newest(config: Config) -> Newest:
    """Find it among the durable ones and those in memory. Step 0, too, if the store does not answer in time.

    The time is world.init_timeout_seconds.
    """
    from mingpt.snapshot import elsewhere  # imports torch
    from mingpt.tiers import tiers

    answers = [Newest(0)]

    def read() -> None:
        with suppress(Exception):  # the workers run into the same error, and report it
            marker = elsewhere.read_marker(config.run.dir)
            answers.append(Newest(tiers.newest(config), marker.host if marker else ""))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(config.world.init_timeout_seconds)
    return answers[-1]


def configured(arguments: list[str]) -> Config:
    """The config of `mingpt launch` with these arguments."""
    return compose.configure(given(parse("launch", arguments)))


def main(arguments: list[str]) -> int:
    say(str(newest(configured(arguments)).step))
    return FINISHED


if __name__ == "__main__":
    sys.exit(code_of(partial(main, sys.argv[1:])))
