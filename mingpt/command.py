"""How a command for people ends: each error in one line, with its exit code.

Programs that live under signals and launchers (train, evaluate, launch) have world/entry.py in place of this.
"""

import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import NoReturn

from mingpt.console import complain
from mingpt.errors import CRASHED, USER_ERROR, TransientError, UserError

INTERRUPTED = 130  # what a shell says of a program that Ctrl-C has ended
UNFIT = 1

Main = Callable[[list[str]], int]


class Unfit(Exception):
    """What the command has looked at is not what it should be; exit 1."""


def command(interrupted: str = "") -> Callable[[Main], Main]:
    """For a `main(arguments)`: it returns the exit code of whatever it raises. interrupted: what Ctrl-C is told."""

    def decorate(main: Main) -> Main:
        @wraps(main)
        def guarded(arguments: list[str]) -> int:
            try:
                return main(arguments)
            except UserError as error:
                return _end(error, USER_ERROR)
            except TransientError as error:
                return _end(error, CRASHED)
            except Unfit as error:
                return _end(error, UNFIT)
            except BrokenPipeError:  # nobody reads any more (`| head`)
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's last flush complains
                return 0
            except KeyboardInterrupt:
                if interrupted:
                    complain(interrupted)
                return INTERRUPTED

        return guarded

    return decorate


def _end(error: Exception, code: int) -> int:
    complain(f"error: {error}")
    return code


def program(module: str) -> str:
    """What usage lines call a program, as it was called: `mingpt VERB` (cli.py), or `python -m` of its module."""
    return sys.argv[0] if sys.argv[0].startswith("mingpt ") else f"python -m {module}"


def run(module: str) -> NoReturn:
    """`python -m` of a module whose `main` is a command. It is imported here, since torch takes seconds to import."""
    try:
        main: Main = import_module(module).main
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(main(sys.argv[1:]))
