"""Ends a command: each error in one line, with its exit code.

Train, evaluate and launch, which receive stop signals, use world/entry.py instead.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from importlib import import_module
from typing import NoReturn

from mingpt.console import complain, ended
from mingpt.errors import CRASHED, USER_ERROR, TransientError, UserError
from mingpt.importing import importing

INTERRUPTED = 130  # as shells report a program that was ended by Ctrl-C
UNFIT = 1
CLEAN_SECONDS = 0.7  # for what a command does after Ctrl-C

Main = Callable[[list[str]], int]


class Unfit(Exception):
    """The command ran, and its check failed (a damaged snapshot). Exit 1."""


def command(interrupted: str = "") -> Callable[[Main], Main]:
    """Decorate a `main(arguments)`: print its errors, return their exit codes.

    interrupted: printed after Ctrl-C or SIGTERM, for a command that cleans up then: both raise KeyboardInterrupt in it.
    """

    def decorate(main: Main) -> Main:
        @wraps(main)
        def guarded(arguments: list[str]) -> int:
            try:
                with _raising() if interrupted else nullcontext():
                    return ended(main(arguments))
            except UserError as error:
                return _end(error, USER_ERROR)
            except TransientError as error:
                return _end(error, CRASHED)
            except Unfit as error:
                return _end(error, UNFIT)
            except KeyboardInterrupt as end:
                if interrupted:
                    complain(interrupted)
                return end.args[0] if end.args else INTERRUPTED
            except Exception:  # a bug of ours: not 1, which says that a check has failed
                traceback.print_exc()
                return CRASHED

        return guarded

    return decorate


@contextmanager
def _raising() -> Iterator[None]:
    def stop(number: int, frame: object) -> NoReturn:
        limit = threading.Timer(CLEAN_SECONDS, os._exit, [128 + number])
        limit.daemon = True
        limit.start()
        raise KeyboardInterrupt(128 + number)

    # If the limit ends this process, multiprocessing's tracker frees what is left, and would warn of it.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    sys.exit(main(sys.argv[1:]))
