"""`${now:…}` in a config means one moment: that of the launcher, in all the processes that it starts, whenever it does.

Each process of its own clock would train into another run.name, and each restart would begin a new run.
"""

import os
import re
import time
from datetime import datetime

from omegaconf import OmegaConf

MOMENT = "MINGPT_MOMENT"  # seconds since 1970; set by mingpt.launch for its workers
ASKS = re.compile(r"\$\{\s*now\s*:")

_asked: list[str] = []  # the patterns that were resolved


def register() -> None:
    """Take the place of Hydra's resolver, which it registers anew whenever it is initialized."""
    OmegaConf.register_new_resolver("now", _now, replace=True)


def was_asked() -> bool:
    """Whether a config of this process has asked for the time."""
    return bool(_asked)


def _now(pattern: str) -> str:
    _asked.append(pattern)
    moment = float(os.environ.get(MOMENT) or time.time())
    return datetime.fromtimestamp(moment).strftime(pattern)
