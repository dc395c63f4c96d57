"""How train, evaluate and launch begin and end: the programs that receive stop signals and return exit codes.

Imports only the standard library: see lifetime.py.
"""

import os
import sys
from importlib import import_module
from typing import NoReturn

from mingpt.console import complain, ended
from mingpt.errors import USER_ERROR, UserError
from mingpt.importing import importing
from mingpt.world import slurm
from mingpt.world.lifetime import Lifetime


def run(module: str, program: str, lifetime: Lifetime, worker: bool) -> NoReturn:
    """Run a program, and end this process with its exit code.

    program: a function of the module, from the arguments and `lifetime` to the exit code. It is imported after signals
    are handled, since importing torch takes seconds.
    worker: the program joins a world, so if srun has started it, set torchrun's variables from Slurm's.
    """
    try:
        if worker:
            slurm.set_torchrun_variables(os.environ)
    except UserError as error:
        complain(f"error: {error}")
        sys.exit(USER_ERROR)
    lifetime.begin()
    try:
        with importing():
            function = getattr(import_module(module), program)
    except ImportError as error:  # one of torch's libraries is missing, or the installation is incomplete
        complain(f"error: this Python environment is broken: {error}: install the project again, as its README says")
        sys.exit(USER_ERROR)
    code: int = function(sys.argv[1:], lifetime)
    if (
        "TORCHELASTIC_RUN_ID" not in os.environ
    ):  # a worker that has finished is not started again: its launcher prints, too
        code = ended(code)
    # Not sys.exit: launchers act on the exit code, and Python's shutdown could replace it by SIGABRT. After an error,
    # the traceback keeps process groups and so gloo's threads alive (see joining.join).
    os._exit(code)
