"""`python -m mingpt.evaluate URL [data=… data.path=…]`: evaluate a snapshot's model on a validation split.

The data are those of the snapshot's config, changed by Hydra's overrides, and encoded in the snapshot's vocabulary.
Runs alone or as one of torchrun's or srun's processes, with the same figures.

Exit codes: 0 done; 64 an error that the user must fix; 70 crashed, try again.
"""

from mingpt.world import entry
from mingpt.world.lifetime import Lifetime


def load() -> entry.Program:
    from mingpt.commands.evaluate import command

    return command


if __name__ == "__main__":
    entry.run(load, Lifetime(), worker=True)
