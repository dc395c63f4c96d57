"""Ends a command: each error in one line, with its exit code.

Train, evaluate and launch, which receive stop signals, use world/entry.py instead.
"""

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import NoReturn

from mingpt.console import complain, ended
from mingpt.errors import CRASHED, USER_ERROR, TransientError, UserError
from mingpt.importing import importing

INTERRUPTED = 130  # as shells report a program that was ended by Ctrl-C
UNFIT = 1

Main = Callable[[list[str]], int]


class Unfit(Exception):
    """The command ran, and its check failed (a damaged snapshot). Exit 1."""


def command(interrupted: str = "") -> Callable[[Main], Main]:
    """Decorate a `main(arguments)`: print its errors, return their exit codes. interrupted: printed after Ctrl-C."""

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
    """What usage lines call a program, as it was called: `mingpt COMMAND` (cli.py), or `python -m` of its module."""
    return sys.argv[0] if sys.argv[0].startswith("mingpt ") else f"python -m {module}"


def run(module: str) -> NoReturn:
    """Run the `main` of a module as a program. Imported here, so that Ctrl-C during torch's import ends quietly."""
    try:
        with importing():
            main: Main = import_module(module).main
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(ended(main(sys.argv[1:])))
