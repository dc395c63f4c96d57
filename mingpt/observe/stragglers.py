"""Names processes that are slower than the others, with their machine: each step waits for the slowest."""

import time
from collections.abc import Callable, Sequence
from statistics import median_low

from mingpt.observe.events import Event, StepDone

WINDOW_SECONDS = 180.0  # over which times are added up and compared
REMIND_SECONDS = 3600.0  # between two lines about one process that stays slow
LEAST_SHARE = 0.05  # of the window: a process that loses less than this against the median is not named
CALM_WINDOWS = 3  # in a row without it, after which a process is as fast as the others again
KINDS = ("computing", "waiting for data")


class Stragglers:
    """hosts: by rank. shares: microbatches of each process in a step; times are compared per microbatch.

    ratio: health.straggler_ratio. now: a time in seconds; only differences count.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        shares: Sequence[int],
        ratio: float,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.hosts, self.shares, self.ratio, self.say, self.now = hosts, shares, ratio, say, now
        self._said: dict[tuple[str, int], float] = {}  # who is known to be slow, and when it was said last
        self._calm: dict[tuple[str, int], int] = {}  # windows in a row in which it was not
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
                self._compare(kind, now)
            self._begin(now)

    def _compare(self, kind: str, now: float) -> None:
        each = [seconds / share / self._steps for seconds, share in zip(self._seconds[kind], self.shares, strict=True)]
        usual, least = median_low(each), LEAST_SHARE * (now - self._since) / self._steps
        for rank, one in enumerate(each):
            key, who = (kind, rank), f"rank {rank} on {self.hosts[rank]}"
            if one > self.ratio * usual and (one - usual) * self.shares[rank] > least:
                self._calm[key] = 0
                if now - self._said.get(key, -REMIND_SECONDS) >= REMIND_SECONDS:
                    still = "is still" if key in self._said else "is"
                    self._said[key] = now
                    self.say(
                        f"SLOW: {who} {still} {one * 1e3:,.0f} ms {kind} for each microbatch, against a median of "
                        f"{usual * 1e3:,.0f} ms (over {(now - self._since) / 60:.0f} min)"
                    )
            elif key in self._said:
                self._calm[key] += 1
                if self._calm[key] == CALM_WINDOWS:
                    del self._said[key]
                    self.say(f"{who} is no longer slow ({kind})")
