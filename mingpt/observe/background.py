"""A thread for what may block or fail: it never delays or ends the run."""

import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Generic, TypeVar

from mingpt.cli.console import Say

MOST_WAITING = 1000  # items; beyond, new ones are dropped
Item = TypeVar("Item")


class Background(Generic[Item]):
    """Hands items to a function in a thread. The first failure is reported, and the first item that is dropped.

    opened: gives the function, and closes what that needs; used in the thread only. ready: it has, or has failed.
    """

    def __init__(
        self, what: str, opened: Callable[[], AbstractContextManager[Callable[[Item], None]]], say: Say
    ) -> None:
        self.what, self._opened, self._say = what, opened, say
        self._items: queue.Queue[Item | None] = queue.Queue(MOST_WAITING)
        self._told_of_failure = self._told_of_drop = False
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=what, daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        try:
            if self._thread.is_alive():
                self._items.put_nowait(item)
        except queue.Full:
            if not self._told_of_drop:
                self._say(f"{self.what} does not keep up: what comes now is left out. The run goes on.")
            self._told_of_drop = True

    def end(self) -> None:
        """Nothing is put any more."""
        with suppress(queue.Full):  # then `close` waits in vain
            self._items.put_nowait(None)

    def close(self, seconds: float) -> None:
        """Wait for what was put, but not longer than `seconds`."""
        self.end()
        self._thread.join(seconds)
        if self._thread.is_alive():
            late = "end in time: its last items may be lost"
            if not self.ready.is_set():
                late = "open in time: it got nothing of this attempt"
            self._say(f"{self.what} did not {late}")

    def _run(self) -> None:
        try:
            with self._opened() as work:
                self.ready.set()
                while (item := self._items.get()) is not None:
                    try:
                        work(item)
                    except Exception as error:
                        self._report(error)
        except Exception as error:  # of opening or closing
            self._report(error)
        finally:
            self.ready.set()

    def _report(self, error: Exception) -> None:
        if not self._told_of_failure:
            reason = str(error).strip().rstrip(".") or type(error).__name__
            self._say(f"{self.what} failed: {reason}. The run goes on.")
        self._told_of_failure = True
