"""Measures how a process spends its time: each second belongs to one named phase.

Imports only the standard library, since the clock starts before torch is imported.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PAUSED = "paused"  # the phase in which the process did not run
# Phases that the watchdog asks for: what takes long there is no hang (liveness.py).
SNAPSHOT, COMPILE = "snapshot", "compile"
LEAST_PAUSE = 5.0  # seconds: less may be a busy machine


def awake_and_asleep() -> float:
    """Seconds that go on while the machine sleeps, where the system has such a clock (Linux)."""
    # Python's monotonic clock stands still while Linux sleeps: with it, accounts did not add up to the wall clock.
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Pauses:
    """Notices that this process has not run: a signal had stopped it, or the machine slept. cpu: its CPU seconds."""

    def __init__(
        self, now: Callable[[], float] = awake_and_asleep, cpu: Callable[[], float] = time.process_time
    ) -> None:
        self._now, self._cpu = now, cpu
        self._before = now(), cpu()

    def look(self, beat: float) -> float:
        """Seconds of a pause since the last look, which was to come after `beat` seconds; 0: there was none."""
        (then, used), self._before = self._before, (self._now(), self._cpu())
        gap = self._before[0] - then - beat
        # A late look alone is no pause. CPU seconds tell them apart: who holds the interpreter lock uses some.
        return gap if gap >= LEAST_PAUSE and self._before[1] - used < gap / 10 else 0.0


class Clock:
    """What the main thread does now (`phase`), and the seconds that each phase has taken.

    How far the process has come is another fact: Lifetime.phase, which never goes back.
    """

    def __init__(self, phase: str = "import", now: Callable[[], float] = awake_and_asleep) -> None:
        """Start in `phase`. now: returns a time in seconds; only differences count."""
        self._now = now
        self._since = now()  # when the phase began
        self._away = 0.0  # seconds of pauses that are not booked yet
        self.phase = phase
        self._last_long = phase  # the last phase that may have had a pause in it
        self._seconds: Counter[str] = Counter()

    def enter(self, phase: str) -> None:
        """Count the time from now on for this phase."""
        now = self._now()
        spent = now - self._since
        away = self._away
        if away:
            # Not `= 0`: meanwhile the other thread may have added a pause.
            self._away -= away
            # The thread that notices a pause comes up to a second late, perhaps after the phase of the pause has ended.
            # A phase that is shorter than the pause can't have had it: then it was the last one that was long enough.
            self._seconds[PAUSED] += away  # type: ignore[assignment]
            self._seconds[self.phase if spent >= away else self._last_long] -= away  # type: ignore[assignment]
        if spent >= LEAST_PAUSE:
            self._last_long = self.phase
        self._seconds[self.phase] += spent  # type: ignore[assignment]
        self.phase, self._since = phase, now

    def pause(self, seconds: float) -> None:
        """Count the last seconds for PAUSED, at the next change of phase. Called by another thread."""
        self._away += seconds

    def paused(self) -> float:
        """Seconds of all pauses so far."""
        return self._seconds[PAUSED] + self._away

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
        current = max(0.0, self._now() - self._since - self._away) if phase == self.phase else 0.0
        return self._seconds[phase] + current


@contextmanager
def compiler_named(clock: Clock) -> Iterator[None]:
    """Have the clock's phase be COMPILE in this block whenever torch's compiler works for any thread."""
    from torch._dynamo.callback import callback_handler  # a second of CPU time, spent already where the config compiles

    before = [clock.phase]

    # torch calls these once for compilations that are nested. A compilation is not only part of the first step: it
    # comes again with another shape (batch.double_at, the first evaluation), and a backward's may come in autograd's
    # thread, for which the main thread waits: nobody else enters a phase meanwhile.
    def begin(*_: object) -> None:
        before[0] = clock.phase
        clock.enter(COMPILE)

    def end(*_: object) -> None:
        clock.enter(before[0])

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)
