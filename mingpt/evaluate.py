"""`python -m mingpt.evaluate URL [data=… data.path=…]`: how good the model of a snapshot is on a validation split.

The data is that of the snapshot's config, with Hydra's overrides over it, told in the snapshot's vocabulary. Alone, or
as one of torchrun's or srun's processes: the figures are the same.

Exit codes: 0 done; 64 a mistake to fix; 70 a crash, try again.
"""

from mingpt.world import entry
from mingpt.world.lifetime import Lifetime


def load() -> entry.Program:
    from mingpt.commands.evaluate import command

    return command


if __name__ == "__main__":
    entry.run(load, Lifetime(), worker=True)
