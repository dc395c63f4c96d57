"""The figures that processes exchange in each step besides gradients: losses, token counts, flags, times.

All are known before the last microbatch's backward, so the exchange runs during that backward and costs no extra time.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.compute.tree import shares, tree_sum_of
from mingpt.snapshot.checkpointer import Flags
from mingpt.world.world import World, all_gather

TIMES = 2  # of each process: computing, waiting for data
FLAGS = len(fields(Flags))


@dataclass(frozen=True)
class StepStats:
    """A step's figures, equal in every process, on `World.comm_device`.

    losses: (M,) float64, the summed loss of each microbatch. tokens: float64 scalar, the number of targets (or the sum
    of their weights). flags: (FLAGS,) float64, how many processes raised each flag. times: (W, 2) float64, the seconds
    of each process in the step before: computing, and waiting for data. grad_norm: scalar, on the model's device,
    before clipping.
    """

    losses: Tensor
    tokens: Tensor
    flags: Tensor
    times: Tensor
    grad_norm: Tensor | None = None

    def mean_loss(self) -> float:
        """Nats per token, added along the tree. Waits for the device."""
        return tree_sum_of(self.losses.tolist()) / max(1.0, self.tokens.item())


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


class StatsExchange:
    """One all-gather per step; in a world of one, nothing is sent."""

    def __init__(self, world: World, microbatches: int) -> None:
        self.world = world
        self.shares = [*map(len, shares(*world.shape, microbatches))]
        self.longest = max(self.shares)
        self._received: Tensor | None = None
        self._sent: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, losses: Sequence[Tensor], tokens: Sequence[Tensor], flags: Flags, times: Sequence[float]) -> None:
        """Begin the all-gather. losses, tokens: of this process's microbatches, float32 scalars."""
        n, longest = len(losses), self.longest
        # float64 holds each float32 exactly.
        row = torch.zeros(2 * longest + FLAGS + TIMES, dtype=torch.float64, device=losses[0].device)
        row[:n] = torch.stack(list(losses)).detach()
        row[longest : longest + n] = torch.stack(list(tokens))
        for place, value in enumerate((*astuple(flags), *times), 2 * longest):
            row[place].fill_(value)  # a copy from the host's memory would wait for the device
        self._sent = row.to(self.world.comm_device)
        self._received = self._sent
        if self.world.size > 1:
            self._received = self._sent.new_empty(self.world.size * len(row))
            self._work = all_gather(self._received, self._sent, async_op=True)

    def finish(self) -> StepStats:
        assert self._received is not None
        if self._work is not None:
            self._work.wait()
        rows, longest = self._received.view(self.world.size, -1), self.longest
        losses = torch.cat([row[:n] for row, n in zip(rows, self.shares, strict=True)])
        # Weights are fractions, so the sum's order matters: all M in the order of the microbatches.
        tokens = torch.cat([row[longest : longest + n] for row, n in zip(rows, self.shares, strict=True)]).sum()
        end = 2 * longest + FLAGS
        return StepStats(losses, tokens, rows[:, 2 * longest : end].sum(0), rows[:, end:])


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
