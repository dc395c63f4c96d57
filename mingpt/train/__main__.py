"""`mingpt train [overrides]`: train a GPT, alone or as one of torchrun's or srun's processes; -m: Hydra's multirun.

Exit codes: 0 finished; 64 an error that the user must fix; 70 crashed, try again; 75 stopped on request, start again.
"""

import sys
from typing import NoReturn

from mingpt import command
from mingpt.world import entry
from mingpt.world.lifetime import Lifetime

MULTIRUN = {"-m", "--multirun", "hydra.mode=MULTIRUN"}


def main() -> NoReturn:
    if not MULTIRUN.isdisjoint(sys.argv[1:]):
        command.run("mingpt.commands.multirun")
    entry.run("mingpt.train.attempt", "attempt", Lifetime(), worker=True)


if __name__ == "__main__":
    main()
