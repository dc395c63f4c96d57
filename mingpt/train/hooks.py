"""The hooks of a run's steps: what `context.Hooks` leaves empty."""

from contextlib import AbstractContextManager

import torch

from mingpt.compute.stats import Flags
from mingpt.observe.stragglers import StepTimes
from mingpt.tiers.checkpointer import Checkpointer
from mingpt.train.context import Hooks
from mingpt.world.lifetime import Lifetime


class RunHooks(Hooks):
    """Connects a run's steps with its clock, its snapshots and its stop signals."""

    def __init__(self, checkpointer: Checkpointer, lifetime: Lifetime, device: torch.device) -> None:
        self.checkpointer, self.lifetime = checkpointer, lifetime
        self.step_times = StepTimes(lifetime.clock.seconds, device)

    def begin(self) -> None:
        self.step_times.begin()

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.lifetime.clock.within(name)

    def flags(self) -> Flags:
        return self.checkpointer.flags(self.lifetime.stop)

    def times(self) -> tuple[float, float]:
        return self.step_times()

    def before_update(self) -> None:
        self.checkpointer.before_update()
