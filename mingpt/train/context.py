"""What one step needs, in one class: training, replay, the self-test and benchmarks make one, and call `train_step`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mingpt.compute.batches import BatchPlan
from mingpt.compute.buckets import Bucket, Sliced, make_buckets
from mingpt.compute.exchange import pack
from mingpt.compute.guard import Range, merged
from mingpt.compute.optimizer import Method, Update
from mingpt.compute.reduction import ExactReduction, FastReduction
from mingpt.compute.rules import Rule, muon_names, roles, rules, trainable
from mingpt.compute.stats import Flags, StatsExchange
from mingpt.compute.tree import shares
from mingpt.config.schema import Config
from mingpt.config.section import Own
from mingpt.model.language import LanguageModel
from mingpt.snapshot.format import SharedState
from mingpt.world.world import World


class Hooks:
    """What happens around a step besides computing: nothing. A replay, the self-test and benchmarks take this one.

    A run's own (hooks.py) connects its steps with its clock, its snapshots and its stop signals.
    """

    def begin(self) -> None:
        """Called first in a step."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count the time of a block under this name."""
        return nullcontext()

    def flags(self) -> Flags:
        """What this process tells the others with the step's exchange. Here: nobody asks to stop."""
        return Flags()

    def times(self) -> tuple[float, float]:
        """The seconds that this process has computed and waited for data, for the others."""
        return 0.0, 0.0

    def before_update(self) -> None:
        """Called before the weights change: what still copies them must be waited for."""


ALONE = Hooks()


@dataclass
class StepContext:
    """What a step computes with, besides its number and its data."""

    model: nn.Module
    # The optimizer, which has all state besides the weights.
    update: Update
    # Which samples a step shows. Another one takes its place when batches are dropped.
    plan: BatchPlan
    # The context manager of config.precision.
    autocast: Any
    world: World
    # The sum of the gradients.
    reduction: ExactReduction | FastReduction
    # What processes tell each other in a step besides gradients.
    stats: StatsExchange

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def microbatches(self) -> range:
        """The indices of this process's microbatches in each step."""
        return shares(*self.world.shape, self.plan.microbatches)[self.world.rank]

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def drop(self, batches: Iterable[Range]) -> None:
        """No step shows these batches any more."""
        guard = self.update.guard
        # In both: the guard's is state, which snapshots hold, so that the plan is the same after a resume.
        guard.dropped = merged([*guard.dropped, *batches])
        self.plan = replace(self.plan, dropped=guard.dropped)

    def state(self) -> SharedState:
        """All state of the run; the tensors themselves, not copies."""
        weights: dict[str, Tensor | Sliced] = self.model.state_dict()
        # What the gather in 16 bits leaves of a weight in this process is not its value: the slices' float32 are.
        for packing in self.update.weight_gather.in_16_bits.values():
            weights |= packing.sliced_weights()
        return {"model": weights, "optimizer": self.update.state()}


def make_context(
    config: Config,
    model: nn.Module,
    plan: BatchPlan,
    world: World,
    autocast: Any,
    own: Callable[[Sequence[Bucket], Mapping[str, Rule], World], Method] | None = None,
) -> StepContext:
    """Move the model to this process's device, and make what computes its steps.

    own: makes the user's own optimizer.
    """
    model.to(world.device)
    named = trainable(model)
    role_of = roles(model)
    buckets = make_buckets(named, muon_names(config.optimizer.name, role_of), world, config.shards)
    # Nobody knows what a user's model reads in float32, even if its class derives from one of ours.
    ours = model if isinstance(model, LanguageModel) and not isinstance(config.model, Own) else None
    by_name = rules(named, config.optimizer, role_of)
    update = Update(
        buckets,
        by_name,
        config.optimizer,
        config.schedule,
        world,
        global_size=plan.global_size,
        tokens_per_microbatch=plan.micro_size * config.model.block_size,
        fp16=config.precision == "fp16",
        health=config.health,
        in_16_bits=pack(buckets, ours.linear_matrices() if ours else set[str](), autocast),
        own=own(buckets, by_name, world) if own else None,
    )
    fast = config.reduce == "fast"
    reduction = FastReduction(buckets, world) if fast else ExactReduction(buckets, plan.microbatches, world)
    stats = StatsExchange(world, plan.microbatches)
    return StepContext(model, update, plan, autocast, world, reduction, stats)
