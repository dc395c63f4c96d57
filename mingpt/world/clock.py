"""Where the seconds of a process's life go: each belongs to one named phase.

Only the standard library is imported here: the clock starts before torch does.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Starts in `phase`. now: seconds, from any point in time."""

    def __init__(self, phase: str = "import", now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._since = now, now()
        self.phase = phase
        self._seconds: Counter[str] = Counter()

    def enter(self, phase: str) -> None:
        """From now on, time belongs to this phase."""
        now = self._now()
        self._seconds[self.phase] += now - self._since  # type: ignore[assignment]
        self.phase, self._since = phase, now

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Time inside belongs to this phase, and then to the one before it again."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self, phase: str) -> float:
        """All that this phase has had so far."""
        return self._seconds[phase] + (self._now() - self._since if phase == self.phase else 0.0)
