"""A store that fails or hangs: what a process does about it alone, and what it tells the others.

It writes in threads that run from the start, tries again until a time, and reports what failed for good as JSON.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from mingpt.cli.console import Say
from mingpt.errors import Incomplete, SnapshotFailed, Superseded, TransientError, UserError
from mingpt.files.localfile import T
from mingpt.snapshot.store import Store

FIRST_RETRY_SECONDS = 0.5  # doubled with each further try
REASONS = {kind.__name__: kind for kind in (Superseded, UserError, SnapshotFailed)}


def use_device(device: torch.device) -> None:
    """A thread begins with GPU 0 as its device: each process would take memory of that one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def started_pool(threads: int, name: str, begin: Callable[[], None] | None = None) -> ThreadPoolExecutor:
    """A pool whose threads run already, and stay.

    CPython's Thread.start waits for ever for a thread that dies before it says that it runs, as one does where memory
    is short. At the beginning of an attempt there is memory, or else its first step ends it with a reason.
    """
    pool, together = ThreadPoolExecutor(threads, name, begin), threading.Barrier(threads)
    # Each takes one of these calls, since none returns before the last has come.
    list(pool.map(together.wait, [60.0] * threads))
    return pool


@dataclass(frozen=True)
class Tries:
    """Writes to a store that are tried again. The fields are those of a SnapshotWriter."""

    store: Store
    log: Say
    retry_seconds: float
    limit_seconds: float

    def deadline(self) -> float:
        """The end of the time for writes that begin together now."""
        return time.monotonic() + self.limit_seconds

    def retry(self, act: Callable[[], T], deadline: float) -> T:
        """Call `act` until it succeeds, for retry_seconds, with growing pauses. A UserError is raised at once.

        No try begins after the deadline. So the last one ends within one call of the store after it, and the other
        processes can know how long to wait for this one.
        """
        last_try, pause = min(deadline, time.monotonic() + self.retry_seconds), FIRST_RETRY_SECONDS
        while True:
            if time.monotonic() > deadline:
                raise SnapshotFailed(
                    f"writing has taken longer than world.timeout_seconds={self.limit_seconds:g}: raise that, or use a "
                    f"faster {self.store.key}"
                )
            try:
                with self.store.named_errors():
                    return act()
            except UserError:  # a full disk or a missing right does not pass by itself
                raise
            except Exception as error:
                if time.monotonic() + pause > last_try:
                    raise
                self.log(f"{error}: next try in {pause:g} s")
            time.sleep(pause)
            pause *= 2


def raise_first(results: Sequence[dict[str, Any]]) -> None:
    """Raise the first error among results, as the exception that it was."""
    for result in results:
        if "error" in result:
            raise REASONS[result["kind"]](result["error"])


def failure(what: str, error: BaseException) -> dict[str, Any]:
    """What a process reports in place of a result; `raise_first` raises it. what: what could not be done."""
    if isinstance(error, Superseded):
        return {"error": str(error), "kind": "Superseded"}
    named = "" if isinstance(error, (UserError, TransientError, SnapshotFailed)) else f"{type(error).__name__}: "
    kind = "UserError" if isinstance(error, UserError) else "SnapshotFailed"
    return {"error": f"{what}: {named}{error}", "kind": kind, "again": isinstance(error, Incomplete)}
