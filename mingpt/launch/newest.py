"""`python -m mingpt.launch.newest [overrides]`: the step of the run's newest snapshot; 0 if there is none.

For recipes/slurm/job.py.
"""

import sys
from functools import partial

from mingpt.cli.command import code_of
from mingpt.cli.console import say
from mingpt.cli.parsers import parse
from mingpt.compose import compose
from mingpt.compose.commandline import given
from mingpt.errors import FINISHED
from mingpt.launch.launcher import newest_step


def main(arguments: list[str]) -> int:
    config = compose.configure(tuple(given(parse("launch", arguments))))
    assert config is not None  # the parser has answered --help
    say(str(newest_step(config)))
    return FINISHED


if __name__ == "__main__":
    sys.exit(code_of(partial(main, sys.argv[1:])))
