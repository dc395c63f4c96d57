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
    """Says what each process asks of all, sent with every step's figures; and after that, what any of them has asked.

    They travel with the step, since all must stop, or begin a snapshot, at the same one: by each one's own clock or
    signals, some would wait in a collective that the others never enter.
    """

    # It was asked to stop.
    stop: bool = False
    # snapshot.every_seconds are over.
    due: bool = False
    # A durable snapshot can't start now: its last one is still on its way.
    busy: bool = False
    # The same of a snapshot in memory; raised also once its writer has given up.
    hot_busy: bool = False
    # It can't write durable snapshots any more.
    gave_up: bool = False


TIMES = 2  # of each process: computing, waiting for data
FLAGS = len(fields(Flags))


@dataclass(frozen=True)
class StepStats:
    """A step's figures, equal in every process, on `World.comm_device`."""

    # (M,) float64: the summed loss of each microbatch.
    losses: Tensor
    # float64 scalar: the number of targets, or the sum of their weights.
    tokens: Tensor
    # (FLAGS,) float64: how many processes raised each flag.
    flags: Tensor
    # (W, 2) float64: the seconds of each process in the step before, computing, and waiting for data.
    times: Tensor
    # Scalar, on the model's device: the gradient's norm before clipping.
    grad_norm: Tensor | None = None

    def mean_loss(self) -> float:
        """Nats per token, added along the tree: what a snapshot's metrics store. Waits for the device."""
        return tree_sum_of(self.losses.tolist()) / max(1.0, self.tokens.item())


class StatsExchange:
    """One all-gather per step; in a world of one, nothing is sent."""

    def __init__(self, world: World, microbatches: int) -> None:
        self.world = world
        self.shares = [*map(len, shares(*world.shape, microbatches))]
        # An all-gather takes rows of one length: a process with fewer microbatches fills its row up with zeros.
        self.longest = max(self.shares)
        self._received: Tensor | None = None
        self._sent: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, losses: Sequence[Tensor], tokens: Sequence[Tensor], flags: Flags, times: Sequence[float]) -> None:
        """Begin the all-gather. losses, tokens: of this process's microbatches, float32 scalars."""
        n, longest = len(losses), self.longest
        # float64 holds each float32 exactly, and counts up to 2**53.
        row = torch.zeros(2 * longest + FLAGS + TIMES, dtype=torch.float64, device=losses[0].device)
        row[:n] = torch.stack(list(losses)).detach()
        row[longest : longest + n] = torch.stack(list(tokens))
        for place, value in enumerate((*astuple(flags), *times), 2 * longest):
            row[place].fill_(value)  # a copy from the host's memory would wait for the device
        # Kept until it has arrived.
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
        losses, tokens = list[Tensor](), list[Tensor]()
        for row, n in zip(rows, self.shares, strict=True):
            losses.append(row[:n])
            tokens.append(row[longest : longest + n])
        # A target may count by a fraction, so the order of additions matters. It is torch's, and not ours. But in any
        # world it is given the same M numbers in the order of the microbatches (shares are contiguous, and go up with
        # the ranks), in a new tensor: so on one kind of device the bits are the same.
        count = torch.cat(tokens).sum()
        end = 2 * longest + FLAGS
        return StepStats(torch.cat(losses), count, rows[:, 2 * longest : end].sum(0), rows[:, end:])
