"""The first and the last lines of the programs that signals and launchers deal with: train, evaluate, launch.

Only the standard library is imported here: see lifetime.py.
"""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from mingpt.console import complain
from mingpt.errors import USER_ERROR, UserError
from mingpt.world import slurm
from mingpt.world.lifetime import Lifetime

Program = Callable[[list[str], Lifetime], int]


def run(load: Callable[[], Program], lifetime: Lifetime, worker: bool) -> NoReturn:
    """Run a program and end with its exit code. worker: it may be one of srun's tasks, which make a world.

    load: imports it. Not before signals and the agent's death are watched: torch takes seconds.
    """
    try:
        if worker:
            slurm.announce(os.environ)
    except UserError as mistake:
        complain(f"error: {mistake}")
        sys.exit(USER_ERROR)
    lifetime.begin()
    try:
        program = load()
    except ImportError as error:  # a library of torch's that is not there, or half an installation
        complain(f"error: this Python environment is broken: {error}: install the project again, as its README says")
        sys.exit(USER_ERROR)
    code = program(sys.argv[1:], lifetime)
    sys.stdout.flush()
    sys.stderr.flush()
    # The exit code is what launchers act on. After an error, its traceback still holds DDP and with it gloo's threads
    # (see joining.join), so Python's own shutdown could replace the code by SIGABRT.
    os._exit(code)
