"""Measures how a process spends its time: each second belongs to one named phase.

Imports only the standard library, since the clock starts before torch is imported.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Starts in `phase`. now: returns a time in seconds; only differences count."""

    def __init__(self, phase: str = "import", now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._since = now, now()
        self.phase = phase
        self._seconds: Counter[str] = Counter()

    def enter(self, phase: str) -> None:
        """Count the time from now on for this phase."""
        now = self._now()
        self._seconds[self.phase] += now - self._since  # type: ignore[assignment]
        self.phase, self._since = phase, now

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count the time inside the block for this phase, then return to the phase before it."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def account(self) -> dict[str, float]:
        """Seconds by phase: all of this clock's life."""
        self.enter(self.phase)
        return dict(self._seconds)

    def seconds(self, phase: str) -> float:
        """Seconds counted for this phase so far."""
        return self._seconds[phase] + (self._now() - self._since if phase == self.phase else 0.0)
