"""`mingpt train [overrides]`: train a GPT, alone or as one of torchrun's or srun's processes.

Exit codes: 0 finished; 64 a mistake to fix; 75 stopped on request after a snapshot; 70 a crash, try again.
"""

from typing import NoReturn

from mingpt.world import entry
from mingpt.world.lifetime import Lifetime


def load() -> entry.Program:
    from mingpt.train.attempt import attempt

    return attempt


def main() -> NoReturn:
    entry.run(load, Lifetime(), worker=True)


if __name__ == "__main__":
    main()
