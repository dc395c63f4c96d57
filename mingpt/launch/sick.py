"""`python -m mingpt.launch.sick [overrides]`: the newest snapshot's step and the run's sick hosts, in one line.

For recipes/slurm/job.py.
"""

import sys
from functools import partial

from mingpt.command import code_of
from mingpt.config import compose
from mingpt.config.commandline import given
from mingpt.console import say
from mingpt.errors import FINISHED
from mingpt.launch.launcher import newest_step
from mingpt.observe import sick
from mingpt.parsers import parse


def main(arguments: list[str]) -> int:
    config = compose.configure(tuple(given(parse("launch", arguments))))
    assert config is not None  # the parser has answered --help
    say(" ".join([str(newest_step(config)), *sick.read(config.run.dir)]))
    return FINISHED


if __name__ == "__main__":
    sys.exit(code_of(partial(main, sys.argv[1:])))
