"""How long this process computed and waited in a step, which all processes tell each other."""

import torch

from mingpt.world.clock import Clock


class StepTimes:
    """Seconds of this process in one step, that before: computing, and waiting for data.

    On CUDA the device's: from the step's begin to its last forward. What comes after, other processes may delay.
    """

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self.clock, self.cuda = clock, device.type == "cuda"
        self._seen = (clock.seconds("step"), clock.seconds("wait"))
        self._events = list[torch.cuda.Event]()  # begin and end of a step, then of the next one

    def begin(self) -> None:
        if self.cuda:
            self._mark()

    def __call__(self) -> tuple[float, float]:
        """Called once in each step, before the exchange."""
        now = self.clock.seconds("step"), self.clock.seconds("wait")
        busy, waited = (after - before for after, before in zip(now, self._seen, strict=True))
        self._seen = now
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
