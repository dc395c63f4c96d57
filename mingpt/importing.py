"""Imports are most of a short command's time, and a quarter of that was the search for garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """What is imported here stays until the process ends: it is not searched for garbage, now or later.

    From the command to the second step of a small model: 1.65 in place of 2.25 CPU seconds.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
