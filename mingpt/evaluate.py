"""`python -m mingpt.evaluate URL [data=… data.path=…]`: how good the model of a snapshot is on a validation split.

The data is that of the snapshot's config, with Hydra's overrides over it, told in the snapshot's vocabulary. Alone, or
as one of torchrun's or srun's processes: the figures are the same.

Exit codes: 0 done; 64 a mistake to fix; 70 a crash, try again.
"""

import os
import sys

from mingpt import slurm
from mingpt.console import complain
from mingpt.errors import MISTAKE, Mistake
from mingpt.lifetime import Lifetime

if __name__ == "__main__":
    try:
        slurm.announce(os.environ)
    except Mistake as mistake:
        complain(f"error: {mistake}")
        sys.exit(MISTAKE)
    lifetime = Lifetime()
    lifetime.begin()
    # Not before, and not Python's own end: see train.py.
    from mingpt.evaluator import command

    code = command(sys.argv[1:], lifetime)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
