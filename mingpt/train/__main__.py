"""`mingpt train [overrides]`: train a GPT, alone or as one of torchrun's or srun's processes.

Exit codes: 0 finished; 64 an error that the user must fix; 70 crashed, try again; 75 stopped on request, start again.
"""

from typing import NoReturn

from mingpt.world import entry
from mingpt.world.lifetime import Lifetime


def main() -> NoReturn:
    entry.run("mingpt.train.attempt", "attempt", Lifetime(), worker=True)


if __name__ == "__main__":
    main()
