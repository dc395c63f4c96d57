"""A step's figures as numbers, read without a wait for the device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mingpt.compute.stats import TIMES, Flags, StepStats
from mingpt.compute.tree import tree_sum_of
from mingpt.world.clock import awake_and_asleep


@dataclass(frozen=True)
class Figures:
    """A StepStats as numbers, once they have come from the device."""

    # The number of steps done.
    step: int
    # Of each microbatch, summed over its targets.
    losses: list[float]
    # The number of targets, or the sum of their weights.
    tokens: float
    # Those that at least one process has raised.
    flags: Flags
    # By process, in seconds: computing, and waiting for data.
    busy: list[float]
    waited: list[float]
    # Before clipping.
    grad_norm: float
    # How many steps up to this one were skipped in a row.
    skips: int
    # This step's own, from its begin to its last operation. On CUDA by the device's clock: figures are read during the
    # next step, the last one's right after it, and a speed by the host's clock was 10.9 G tokens/s there.
    seconds: float

    @property
    def loss(self) -> float:
        """Nats per token, added along the tree: what the log shows."""
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
        seconds = self._host - earlier._host
        pause = self._paused - earlier._paused
        if self._event and earlier._event:
            self._event.synchronize()
            seconds = earlier._event.elapsed_time(self._event) / 1e3
        # A pause is noticed up to a second late. One that is longer than this step was in the step before.
        return seconds - pause if pause < seconds else seconds


@dataclass(frozen=True)
class Pending:
    """A step whose numbers are on their way from the device."""

    step: int
    stats: StepStats
    # Float64, in the host's memory, and filled when the device is at `done`.
    values: Tensor
    begun: Moment
    done: Moment


class DelayedRead:
    """Reads each step's figures without waiting for the device: on CUDA, those of the step before.

    All processes are late by the same one step, so they still act at the same step.
    """

    def __init__(
        self,
        skips: Tensor,
        late: bool,
        now: Callable[[], float] = awake_and_asleep,
        paused: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """skips: int64 scalar on the device, which each step changes (Guard.skips).

        late: the device computes while the host goes on. now: a time in seconds; only differences count. paused: how
        many of them the process was stopped so far.
        """
        self._skips, self._late = skips, late
        self._now, self._paused = now, paused
        self._begun: Moment | None = None
        self._pending: Pending | None = None

    def begin(self) -> None:
        """Call this before each step: its time counts from here."""
        self._begun = self._moment()

    def ready(self, step: int, stats: StepStats, drain: bool) -> list[Figures]:
        """The figures that are known after step `step`, oldest first, each step's once.

        drain: no step follows, so this one's figures come, too, and the device is waited for. A late reader does that
        also when the figures of the step before ask to stop, since the attempt then ends with this step.
        """
        values = self._gathered(stats)
        # Before the copy is queued: the host waits here for the step before, and the device has this one's work.
        ready = self._finish()
        assert self._begun
        self._pending = Pending(step, stats, values.to("cpu", non_blocking=True), self._begun, self._moment())
        if not self._late or drain or any(figures.flags.stop for figures in ready):
            ready += self._finish()
        return ready

    def _gathered(self, stats: StepStats) -> Tensor:
        """All numbers in one tensor, so that one copy brings them: each copy has a cost of its own."""
        assert stats.grad_norm is not None
        parts = [stats.losses, stats.tokens.view(1), stats.flags, stats.times.reshape(-1), stats.grad_norm.view(1)]
        device = self._skips.device
        # float64 holds each float32, and each count, exactly.
        numbers = [part.to(device, torch.float64, non_blocking=True) for part in parts]
        return torch.cat([*numbers, self._skips.view(1)])

    def _finish(self) -> list[Figures]:
        """Wait for what is on its way; nothing if nothing is."""
        pending, self._pending = self._pending, None
        if pending is None:
            return []
        seconds = pending.done.since(pending.begun)  # waits for the device, so the values are there
        return [_figures(pending.step, pending.stats, pending.values, seconds)]

    def _moment(self) -> Moment:
        return Moment(self._skips.device, self._now, self._paused)


def _figures(step: int, stats: StepStats, values: Tensor, seconds: float) -> Figures:
    # In the order of DelayedRead._gathered.
    sizes = [len(stats.losses), 1, len(stats.flags), TIMES * len(stats.times), 1, 1]
    losses, tokens, raised, times, norm, skips = (part.tolist() for part in values.split(sizes))
    flags = Flags(*(count > 0 for count in raised))
    return Figures(step, losses, tokens[0], flags, times[::TIMES], times[1::TIMES], norm[0], int(skips[0]), seconds)
