"""`${now:…}` in a config means one moment: that of the launcher, in all the processes that it starts, whenever it does.

Each process of its own clock would train into another run.name, and each restart would begin a new run.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from omegaconf import OmegaConf

MOMENT = "MINGPT_MOMENT"  # seconds since 1970; set by mingpt.launch for its workers
TWO = (951826271.25, 1353274439.75)  # moments that differ in whatever a pattern can tell of them

_other: list[float] = []  # in place of now, while `at` asks what would change
_asked: list[str] = []  # the patterns that were resolved


def register() -> None:
    """Take the place of Hydra's resolver, which it registers anew whenever it is initialized."""
    OmegaConf.register_new_resolver("now", _now, replace=True)


def was_asked() -> bool:
    """Whether a config of this process has asked for the time."""
    return bool(_asked)


@contextmanager
def at(moment: float) -> Iterator[None]:
    _other.append(moment)
    try:
        yield
    finally:
        _other.pop()


def _now(pattern: str) -> str:
    _asked.append(pattern)
    moment = _other[-1] if _other else float(os.environ.get(MOMENT) or time.time())
    return datetime.fromtimestamp(moment).strftime(pattern)
