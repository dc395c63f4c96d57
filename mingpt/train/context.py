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


@dataclass(frozen=True)
class Hooks:
    """What a run does around its steps. The defaults: nobody asks to stop, and nothing is stored or timed.

    flags: what this process tells the others with each step's exchange. before_update: called before the weights
    change. phase: a block whose time is counted under a name. begin: called first in a step. times: the seconds that
    this process has computed and waited for data, for the others.
    """

    flags: Callable[[], Flags] = Flags
    before_update: Callable[[], None] = lambda: None
    phase: Callable[[str], AbstractContextManager[Any]] = nullcontext
    begin: Callable[[], None] = lambda: None
    times: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)


ALONE = Hooks()


@dataclass
class StepContext:
    """What a step needs besides its number and its data. autocast: the context manager of config.precision."""

    model: nn.Module
    update: Update
    plan: BatchPlan
    autocast: Any
    world: World
    reduction: ExactReduction | FastReduction
    stats: StatsExchange
    hooks: Hooks

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def microbatches(self) -> range:
        """The indices of this process's microbatches in each step."""
        return shares(*self.world.shape, self.plan.microbatches)[self.world.rank]

    def drop(self, batches: Iterable[Range]) -> None:
        """No step shows these batches any more."""
        guard = self.update.guard
        guard.dropped = merged([*guard.dropped, *batches])
        self.plan = replace(self.plan, dropped=guard.dropped)

    def state(self) -> SharedState:
        """All state of the run; the tensors themselves, not copies."""
        weights: dict[str, Tensor | Sliced] = self.model.state_dict()
        for packing in self.update.weight_gather.in_16_bits.values():
            weights |= packing.sliced_weights()
        return {"model": weights, "optimizer": self.update.state()}


def make_context(
    config: Config,
    model: nn.Module,
    plan: BatchPlan,
    world: World,
    autocast: Any,
    hooks: Hooks = ALONE,
    own: Callable[[Sequence[Bucket], Mapping[str, Rule], World], Method] | None = None,
) -> StepContext:
    """Move the model to this process's device, and make what computes its steps.

    own: makes the user's own optimizer.
    """
    model.to(world.device)
    named, role_of = trainable(model), roles(model)
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
    return StepContext(model, update, plan, autocast, world, reduction, stats, hooks)
