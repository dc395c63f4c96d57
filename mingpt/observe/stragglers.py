"""Names processes that are slower than the others, with their machine: each step waits for the slowest."""

import time
from collections.abc import Callable, Sequence
from statistics import median_low

import torch

from mingpt.cli.console import Say
from mingpt.observe.events import Event, StepDone

WINDOW_SECONDS = 180.0  # over which times are added up and compared
LEAST_SHARE = 0.05  # of the window: a process that loses less than this against the median is not named
KINDS = ("computing", "waiting for data")


class StepTimes:
    """Seconds of this process in one step, that before: computing, and waiting for data.

    On CUDA the device's: from the step's begin to its last forward. What comes after, other processes may delay.
    """

    def __init__(self, seconds: Callable[[str], float], device: torch.device) -> None:
        """seconds: how many were spent in a phase so far."""
        self.seconds, self.cuda = seconds, device.type == "cuda"
        self._before = (seconds("step"), seconds("wait"))
        self._events = list[torch.cuda.Event]()  # begin and end of a step, then of the next one

    def begin(self) -> None:
        if self.cuda:
            self._mark()

    def __call__(self) -> tuple[float, float]:
        """Called once in each step, before the exchange."""
        now = self.seconds("step"), self.seconds("wait")
        busy, waited = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        if self.cuda:
            self._mark()
            busy = 0.0
            if len(self._events) > 4:  # of two steps ago: the device has passed it
                begin, end = self._events[:2]
                busy = begin.elapsed_time(end) / 1e3 if end.query() else 0.0
                del self._events[:2]
        return busy, waited

    def _mark(self) -> None:
        self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[-1].record()


class Stragglers:
    """Each is named once in an attempt. hosts: by rank. shares: microbatches of each process in a step; times are
    compared per microbatch.

    ratio: health.straggler_ratio. now: a time in seconds; only differences count.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        shares: Sequence[int],
        ratio: float,
        say: Say,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hosts, self.shares, self.ratio, self.say, self.now = hosts, shares, ratio, say, now
        self._named = set[tuple[str, int]]()
        self._begin(now())

    def _begin(self, now: float) -> None:
        self._since, self._steps = now, 0
        self._seconds = {kind: [0.0] * len(self.shares) for kind in KINDS}

    def on(self, event: Event) -> None:
        if not isinstance(event, StepDone) or not event.busy:
            return
        self._steps += 1
        for kind, times in zip(KINDS, (event.busy, event.waited), strict=True):
            self._seconds[kind] = [sum(pair) for pair in zip(self._seconds[kind], times, strict=True)]
        now = self.now()
        if now - self._since >= WINDOW_SECONDS:
            for kind in KINDS:
                self._compare(kind, now - self._since)
            self._begin(now)

    def _compare(self, kind: str, window: float) -> None:
        each = [seconds / share / self._steps for seconds, share in zip(self._seconds[kind], self.shares, strict=True)]
        usual, least = median_low(each), LEAST_SHARE * window / self._steps
        for rank, one in enumerate(each):
            slow = one > self.ratio * usual and (one - usual) * self.shares[rank] > least
            if slow and (kind, rank) not in self._named:
                self._named.add((kind, rank))
                self.say(
                    f"SLOW: rank {rank} on {self.hosts[rank]} is {one * 1e3:,.0f} ms {kind} for each microbatch, "
                    f"against a median of {usual * 1e3:,.0f} ms (over {window / 60:.0f} min)"
                )
