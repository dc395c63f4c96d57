"""Decides which steps are skipped: those whose numbers are not finite, and those whose loss is a spike.

All of it is decided on the device, from figures that are equal in every process: no process waits for its device or for
another one, and every world decides alike. What a spike or a rollback depends on is state (`Guard.state`), so a run
that is killed between two skipped steps goes on as if it had not been. (With neither in the config, `skips` decides
only when the run gives up, and begins anew.)
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mingpt.config.schema import Health

MOST_LOSSES = 1024  # health.spike_window is at most this: a tensor of one shape, so that the setting may change
MOST_RANGES = 64  # health.max_rollbacks is at most this
PREFIX = "health."  # of the names in a snapshot

Range = tuple[int, int]  # of batches: the first, and the one after the last


class Guard:
    """Decides whether a step is skipped.

    After `health.max_skips` skipped steps in a row it refuses every step until the host reacts. So the first skipped
    step is `done - skips`, however late the host reads that number.
    """

    def __init__(self, config: Health, device: torch.device) -> None:
        self.config = config
        # How many steps up to the last one were skipped in a row.
        self.skips = torch.zeros((), dtype=torch.int64, device=device)
        # A ring of the last good losses, and how many there were in all.
        self.losses = torch.zeros(MOST_LOSSES, dtype=torch.float64, device=device)
        self.seen = torch.zeros((), dtype=torch.int64, device=device)
        # Batches that no step shows any more (BatchPlan).
        self.dropped: tuple[Range, ...] = ()

    def refuses(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Tell whether to skip the step: a bool on the device. loss: float64, nats a target; norm: the gradient's."""
        refused = ~(loss.isfinite() & norm.isfinite()) | (self.skips >= self.config.max_skips)
        if self.config.spike_sigma:
            refused = refused | self._is_spike(loss)
            # By a mask: whether the loss is stored only the device knows.
            slot = torch.arange(MOST_LOSSES, device=loss.device) == self.seen % self.config.spike_window
            # Not the refused ones: after a few spikes in the window, the next would be within its deviations.
            self.losses.copy_(torch.where(slot & ~refused, loss, self.losses))
            self.seen.add_((~refused).long())
        self.skips.add_(1).mul_(refused.long())
        return refused

    def _is_spike(self, loss: Tensor) -> Tensor:
        """Tell whether it is too far above the window's mean, in standard deviations; not before the window is full."""
        # Only above: a loss that falls fast is no fault.
        window = self.losses[: self.config.spike_window]
        limit = window.mean() + self.config.spike_sigma * window.std()
        return (self.seen >= self.config.spike_window) & (loss > limit)

    def state(self) -> dict[str, Tensor]:
        """Empty for a run that neither looks for spikes nor goes back, nor ever has."""
        if not (self.config.spike_sigma or self.config.max_rollbacks or self.dropped):
            return {}
        # Of one shape, however many ranges there are: so a snapshot's layout is known beforehand (guard_layout).
        ranges = torch.full((MOST_RANGES, 2), -1, dtype=torch.int64)
        if self.dropped:
            ranges[: len(self.dropped)] = torch.tensor(self.dropped)
        return {
            f"{PREFIX}skips": self.skips,
            f"{PREFIX}losses": self.losses,
            f"{PREFIX}seen": self.seen,
            f"{PREFIX}dropped": ranges,
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave, or a part of it; what a snapshot does not have begins anew."""
        for tensor, name in ((self.skips, "skips"), (self.losses, "losses"), (self.seen, "seen")):
            tensor.copy_(state.get(f"{PREFIX}{name}", tensor))
        if f"{PREFIX}dropped" in state:
            ranges: list[list[int]] = state[f"{PREFIX}dropped"].tolist()
            self.dropped = merged([(first, end) for first, end in ranges if first >= 0])


def guard_layout(names: Sequence[str]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The layout of `Guard.state()`, if any of these names of a snapshot's tensors belongs to it; else empty."""
    scalar = (torch.Size(), torch.int64)
    layout = {
        f"{PREFIX}skips": scalar,
        f"{PREFIX}losses": (torch.Size([MOST_LOSSES]), torch.float64),
        f"{PREFIX}seen": scalar,
        f"{PREFIX}dropped": (torch.Size([MOST_RANGES, 2]), torch.int64),
    }
    return layout if layout.keys() & set(names) else {}


def merged(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same numbers as sorted ranges that do not touch."""
    out: list[Range] = []
    for first, end in sorted(ranges):
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((first, end))
    return tuple(out)
