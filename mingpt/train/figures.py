"""A step's figures as numbers, read without a wait for the device."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mingpt.compute.stats import TIMES, Flags, StepStats
from mingpt.compute.tree import tree_sum_of


@dataclass(frozen=True)
class Figures:
    """StepStats as numbers, once they have come from the device. step: the number of steps done.

    flags: those that at least one process has raised. skips: how many steps up to this one were skipped in a row.
    seconds: this step's own, whenever it is read: from its begin to its last operation, on CUDA by the device's clock.
    """

    step: int
    losses: list[float]
    tokens: float
    flags: Flags
    busy: list[float]
    waited: list[float]
    grad_norm: float
    skips: int
    seconds: float

    @property
    def loss(self) -> float:
        """Nats per token, added along the tree."""
        return tree_sum_of(self.losses) / max(1.0, self.tokens)


class Moment:
    """A point in a device's work: on CUDA when the device gets there, which the host learns later; on a CPU, now."""

    def __init__(self, device: torch.device, now: Callable[[], float], paused: Callable[[], float]) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._host, self._paused = now(), paused()
        if self._event:
            self._event.record()

    def since(self, earlier: "Moment") -> float:
        """Seconds, without those in which the process was stopped. Waits until the device is there."""
        seconds, pause = self._host - earlier._host, self._paused - earlier._paused
        if self._event and earlier._event:
            self._event.synchronize()
            seconds = earlier._event.elapsed_time(self._event) / 1e3
        return seconds - pause if pause < seconds else seconds  # a longer pause was noticed after its step had ended


class DelayedRead:
    """Reads each step's figures without waiting for the device: on CUDA, each call returns those of the call before.

    All processes are late by the same one call, so they still act at the same step.
    """

    def __init__(
        self,
        start: int,
        late: bool,
        now: Callable[[], float] = time.monotonic,
        paused: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """start: the number of steps done before the first call. late: the device computes while the host goes on.
        now: a time in seconds; only differences count. paused: how many of them the process was stopped so far.

        The first call of a late one has nothing to return, and no flag is raised.
        """
        self._none = Figures(start, [], 0.0, Flags(), [], [], math.nan, 0, 0.0)
        self._late, self._times = late, (now, paused)
        self._begun: Moment | None = None
        self._pending: tuple[int, StepStats, Tensor, Moment, Moment] | None = None

    def begin(self, device: torch.device) -> None:
        """Call this before each step: its time counts from here."""
        self._begun = Moment(device, *self._times)

    def __call__(self, step: int, stats: StepStats, skips: Tensor) -> Figures:
        """skips: int64 scalar on the device, see compute/guard.py."""
        assert stats.grad_norm is not None
        assert self._begun
        device = skips.device
        parts = (stats.losses, stats.tokens.view(1), stats.flags, stats.times.reshape(-1), stats.grad_norm.view(1))
        values = torch.cat([*(part.to(device, torch.float64, non_blocking=True) for part in parts), skips.view(1)])
        before = self.last() or self._none
        values = values.to("cpu", non_blocking=True)
        self._pending = step, stats, values, self._begun, Moment(device, *self._times)
        if self._late:  # on CUDA: what was read above, of the step before
            return before
        return self.last() or before

    def last(self) -> Figures | None:
        """Read what the last call has not returned yet; None if there is nothing."""
        if self._pending is None:
            return None
        (step, stats, values, begun, done), self._pending = self._pending, None
        seconds = done.since(begun)  # waits for the device, so the values are there
        return _figures(step, stats, values, seconds)


def _figures(step: int, stats: StepStats, values: Tensor, seconds: float) -> Figures:
    sizes = [len(stats.losses), 1, len(stats.flags), TIMES * len(stats.times), 1, 1]
    losses, tokens, raised, times, norm, skips = (part.tolist() for part in values.split(sizes))
    flags = Flags(*(count > 0 for count in raised))
    return Figures(step, losses, tokens[0], flags, times[::TIMES], times[1::TIMES], norm[0], int(skips[0]), seconds)
