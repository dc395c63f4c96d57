"""What the loop needs, built once for an attempt (session.py). All of it is alike in all processes but `mine`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mingpt.compute.batches import BatchPlan
from mingpt.compute.optimizer import Update
from mingpt.compute.reduction import Reduction
from mingpt.config.schema import Config
from mingpt.data.source import Source
from mingpt.observe.events import Observers
from mingpt.snapshot.attempts import RunRecord
from mingpt.snapshot.checkpointer import Checkpointer
from mingpt.snapshot.format import State
from mingpt.train.stats import DelayedRead, StatsExchange
from mingpt.world.distributed import World
from mingpt.world.lifetime import Lifetime


@dataclass
class Compute:
    """What a step is made of.

    autocast: the context in which the model computes in its precision. buffers: what an own model's buffers held
    before the first step.
    """

    model: nn.Module
    update: Update
    plan: BatchPlan
    autocast: Any
    buffers: dict[str, Tensor]

    def state(self) -> State:
        """All that is state; the tensors themselves, not copies."""
        return {"model": self.model.state_dict(), "optimizer": self.update.state()}


@dataclass
class Run:
    """One attempt. start: steps that were done before it. mine: this process's microbatches of each step.

    batches: their tensors, in order. best_val_loss: the lowest so far, in this run; infinite: none was measured.
    """

    config: Config
    source: Source
    world: World
    lifetime: Lifetime
    compute: Compute
    ddp: DistributedDataParallel
    reduction: Reduction
    stats: StatsExchange
    read_flags: DelayedRead
    mine: range
    batches: Iterator[Sequence[Tensor]]
    checkpointer: Checkpointer
    observers: Observers
    record: RunRecord
    start: int
    best_val_loss: float

    @property
    def last_step(self) -> int:
        return self.config.train.max_steps
