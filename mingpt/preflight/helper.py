"""A process of its own for what needs torch or may hang; preflight waits for each answer with a limit."""

import os
from collections.abc import Callable
from multiprocessing import TimeoutError as NoAnswer
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult
from typing import Any

from mingpt.errors import UserError
from mingpt.files.storage import LIMIT
from mingpt.world.lifetime import end_with_parent

# Limit of a call of the store, unless the environment sets one. The first call makes the client, too: with load 20 on
# two cores, a healthy store's answer once took more than 8 s.
STORE_SECONDS = "20"


class Unreached(Exception):
    """A node or the store does not answer, or has gone."""


class Helper:
    """Calls functions one after another. It is ended with this process, even if it hangs."""

    def __init__(self) -> None:
        # Not a fork: this process has threads (another pool's), and a lock that one holds then stays so in the child.
        self._pool = get_context("spawn").Pool(1, _begin, (os.getpid(),))

    def ask(self, function: Callable[..., Any], *arguments: Any) -> "AsyncResult[Any]":
        return self._pool.apply_async(_call, (function, *arguments))

    def end(self) -> None:
        # Not close(), which waits for what has been asked: that may hang for ever.
        self._pool.terminate()
        self._pool.join()


def answer(asked: "AsyncResult[Any]", seconds: float) -> Any:
    """Raises Unreached if there is none within `seconds`; and what the function has raised."""
    try:
        return asked.get(seconds)
    except NoAnswer:
        raise Unreached(f"no answer within {seconds:.0f} s") from None


def _begin(parent: int) -> None:
    end_with_parent(parent)
    os.environ.setdefault(LIMIT, STORE_SECONDS)
    for stream in (1, 2):  # torch's warnings; errors are returned
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (OSError, UserError):
        raise
    except Exception as error:  # torch's have no classes of their own, or such as only torch can read
        raise Unreached(next(iter(str(error).splitlines()), type(error).__name__)) from None
