"""`python -m mingpt.launch.sick [overrides]`: the newest snapshot's step and the run's sick hosts, in one line.

For recipes/slurm/job.sh.
"""

import sys

from mingpt.config import compose
from mingpt.config.commandline import given
from mingpt.console import complain, say
from mingpt.errors import USER_ERROR, UserError
from mingpt.observe import sick


def main(arguments: list[str]) -> int:
    from mingpt.launch.launcher import newest_step
    from mingpt.launch.torchrun import parse

    try:
        config = compose.configure(tuple(given(parse(arguments))))
        assert config is not None  # the parser has answered --help
        say(" ".join([str(newest_step(config)), *sick.read(config.run.dir)]))
    except UserError as error:
        complain(f"error: {error}")
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
