"""`mingpt train [overrides]`: train a GPT, alone or as one of torchrun's or srun's processes; -m: Hydra's multirun.

Exit codes: 0 finished; 64 an error that the user must fix; 70 crashed, try again; 75 stopped on request, start again.
"""

import sys
from typing import NoReturn

from mingpt import command
from mingpt.world import entry
from mingpt.world.lifetime import Lifetime

# Hydra's options after which nothing is trained here, by what answers them.
ANSWERS = {
    "multirun": {"-m", "--multirun", "hydra.mode=MULTIRUN"},
    "printing": {"-h", "--help", "-c", "--cfg", "-i", "--info", "--hydra-help", "-sc", "--shell-completion"},
}


def main() -> NoReturn:
    for module, options in ANSWERS.items():
        if not options.isdisjoint(word if word in options else word.partition("=")[0] for word in sys.argv[1:]):
            command.run(f"mingpt.commands.{module}")
    entry.run("mingpt.train.attempt", "attempt", Lifetime(), worker=True)


if __name__ == "__main__":
    main()
