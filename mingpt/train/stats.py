"""The figures that processes exchange in each step besides gradients: losses, token counts, flags (stop, snapshot).

All are known before the last microbatch's backward, so the exchange runs during that backward and costs no extra time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.compute.reduction import tree_sum_of
from mingpt.world.world import World, all_gather, share


@dataclass(frozen=True)
class StepStats:
    """A step's figures, equal in every process, on `World.comm_device`.

    losses: (M,) float64, the summed loss of each microbatch. tokens: float64 scalar, the number of targets (or the sum
    of their weights). flags: (K,) float64, the number of processes that raised each flag. grad_norm: scalar, on the
    model's device, before clipping.
    """

    losses: Tensor
    tokens: Tensor
    flags: Tensor
    grad_norm: Tensor | None = None

    def mean_loss(self) -> float:
        """Nats per token, added along the tree. Waits for the device."""
        return tree_sum_of(self.losses.tolist()) / max(1.0, self.tokens.item())

    def norm(self) -> float:
        """Waits for the device."""
        assert self.grad_norm is not None
        return float(self.grad_norm)


class StatsExchange:
    """One all-gather per step. flags: how many there are."""

    def __init__(self, world: World, microbatches: int, flags: int) -> None:
        self.world, self.flags = world, flags
        self.shares = [len(share(r, world.size, microbatches)) for r in range(world.size)]
        self.longest = max(self.shares)
        self._received: Tensor | None = None
        self._sent: Tensor | None = None
        self._work: dist.Work | None = None

    def start(self, losses: Sequence[Tensor], tokens: Sequence[Tensor], flags: Sequence[bool]) -> None:
        """Begin the all-gather. losses, tokens: of this process's microbatches, float32 scalars."""
        n, longest = len(losses), self.longest
        # float64 holds each float32 exactly.
        row = torch.zeros(2 * longest + self.flags, dtype=torch.float64, device=losses[0].device)
        row[:n] = torch.stack(list(losses)).detach()
        row[longest : longest + n] = torch.stack(list(tokens))
        if any(flags):
            row[2 * longest :] = torch.tensor(flags, dtype=torch.float64)
        self._sent = row.to(self.world.comm_device)
        self._received = self._sent.new_empty(self.world.size * len(row))
        self._work = all_gather(self._received, self._sent, async_op=True)

    def finish(self) -> StepStats:
        assert self._work is not None
        assert self._received is not None
        self._work.wait()
        rows, longest = self._received.view(self.world.size, -1), self.longest
        losses = torch.cat([row[:n] for row, n in zip(rows, self.shares, strict=True)])
        # Weights are fractions, so the sum's order matters: all M in the order of the microbatches.
        tokens = torch.cat([row[longest : longest + n] for row, n in zip(rows, self.shares, strict=True)]).sum()
        return StepStats(losses, tokens, rows[:, 2 * longest :].sum(0))


class DelayedRead:
    """Reads a small tensor without waiting for the device: on CUDA, each call returns the value of the call before.

    All processes are late by the same one call, so they still act at the same step.
    """

    def __init__(self) -> None:
        self._pending: tuple[Tensor, torch.cuda.Event] | None = None

    def __call__(self, value: Tensor) -> list[float]:
        if value.device.type == "cpu":
            return value.tolist()
        before = self._pending
        event = torch.cuda.Event()
        self._pending = (value.to("cpu", non_blocking=True), event)
        event.record()
        if before is None:
            return [0.0] * value.numel()
        before[1].synchronize()
        return before[0].tolist()
