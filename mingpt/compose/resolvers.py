"""What `${now:…}` and `${mingpt.name:…}` stand for in a config.

`${now:…}` means one moment: that of the launcher, in all the processes that it starts, whenever it does. With its own
clock each process would train into another run.name, and each restart would begin a new run.
"""

import os
import re
import time
from datetime import datetime
from hashlib import sha256

from omegaconf import OmegaConf

MOMENT = "MINGPT_MOMENT"  # seconds since 1970; set by mingpt.launch for its workers
ASKS = re.compile(r"\$\{\s*now\s*:")
LONGEST = 100  # characters of a job's name

asked: list[str] = []  # the patterns that configs of this process have resolved


def take_now() -> None:
    """Take the place of Hydra's resolver, which it registers anew whenever it is initialized."""
    OmegaConf.register_new_resolver("now", _now, replace=True)


def _now(pattern: str) -> str:
    asked.append(pattern)
    moment = float(os.environ.get(MOMENT) or time.time())
    return datetime.fromtimestamp(moment).strftime(pattern)


def name_of(overrides: str) -> str:
    """A job's name, which any file system, bucket and shell takes, as run.name must be; it ends in a checksum where it
    lost characters.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", overrides).lstrip("._-") or "only"
    if overrides and (safe != overrides or len(safe) > LONGEST):
        return f"{safe[: LONGEST - 9]}-{sha256(overrides.encode()).hexdigest()[:8]}"
    return safe


OmegaConf.register_new_resolver("mingpt.name", name_of, replace=True)
