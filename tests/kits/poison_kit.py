"""A linear model, and data of which some batches are poison; for tests in this process and in others."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mingpt.compute.batches import BatchPlan
from mingpt.data.own import source_of
from mingpt.data.source import Source

SAMPLES, GLOBAL, MICRO, SEED = 480, 12, 2, 1
PLAN = BatchPlan(SAMPLES, SEED, GLOBAL, MICRO)
POISONED = (
    "model._target_=tests.kits.poison_kit.Line", "data._target_=tests.kits.poison_kit.rows",
    f"batch.global_size={GLOBAL}",
    f"batch.micro_size={MICRO}", f"seed={SEED}", "schedule.kind=constant", "schedule.warmup_steps=0",
    "train.eval_every=0", "train.log_every=1", "train.max_steps=36", "snapshot.every_steps=5",
    "snapshot.every_seconds=0", "snapshot.keep=20", "snapshot.asynchronous=false", "snapshot.hot_every_steps=0",
    "health.spike_window=8", "track=[]",
)  # fmt: skip
GUARDED = ("health.spike_sigma=8", "health.max_skips=2", "health.max_rollbacks=1")


class Line(nn.Module):
    """A linear function of three numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.mse_loss(self.layer(x).squeeze(1), y, reduction="sum"), torch.tensor(len(y))


def rows(batches: Sequence[int] = (), times: float = 1e3) -> Source:
    """x -> its sum; in the second microbatch of these batches the sum is so many times too large."""
    x = torch.rand(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    y = x.sum(1)
    for batch in batches:
        y[PLAN.sample_ids(batch)[MICRO : 2 * MICRO]] *= times
    return source_of((x, y), (x[:0], y[:0]), 4)


def poison(batches: Sequence[int], times: float = 1e3) -> tuple[str, ...]:
    """The overrides that poison these batches (see rows)."""
    return f"+data.batches=[{','.join(map(str, batches))}]", f"+data.times={times:g}"
