"""The figures that processes exchange in each step besides gradients: losses, token counts, flags, times.

All are known before the last microbatch's backward, so the exchange runs during that backward and costs no extra time.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.compute.tree import shares, tree_sum_of
from mingpt.world.world import World, all_gather


@dataclass(frozen=True)
class Flags:
    """What each process tells the others with every step's statistics; and what at least one of them has told.

    stop: asked to stop. due: snapshot.every_seconds are over. busy, hot_busy: a snapshot of that tier can't start now.
    broken: this process can't write durable snapshots any more.
    """

    stop: bool = False
    due: bool = False
    busy: bool = False
    hot_busy: bool = False
    broken: bool = False


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
