"""`python -m mingpt.train [overrides]`: train a GPT, alone or as one of torchrun's or srun's processes.

Exit codes: 0 finished; 64 a mistake to fix; 75 stopped on request after a snapshot; 70 a crash, try again.
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
    # Not before: torch takes seconds to import, and signals and the agent's death must be watched by then.
    from mingpt.attempt import attempt

    code = attempt(sys.argv[1:], lifetime)
    sys.stdout.flush()
    sys.stderr.flush()
    # The exit code is what launchers act on. After an error, its traceback still holds DDP and with it gloo's threads
    # (see distributed.join), so Python's own shutdown could replace the code by SIGABRT.
    os._exit(code)
