"""What computes one step outside of a run: `train/step.py` with a world of one, and nothing that writes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mingpt.compute.guard import Range, merged
from mingpt.compute.layout import misfits
from mingpt.config.schema import Config
from mingpt.data.source import Microbatch, Source
from mingpt.errors import UserError
from mingpt.model.language import IGNORE
from mingpt.snapshot.format import Kind
from mingpt.train.factory import build, prepare
from mingpt.train.run import Compute
from mingpt.train.session import build_compute, make_reduction
from mingpt.train.stats import DelayedRead, Figures, StatsExchange
from mingpt.train.step import train_step
from mingpt.train.times import StepTimes
from mingpt.world.clock import Clock
from mingpt.world.world import World

if TYPE_CHECKING:
    from mingpt.train.run import Run


@dataclass(frozen=True)
class Saved:
    """Copies of the state after `step` steps. dropped: batches that are shown no more."""

    step: int
    state: dict[Kind, dict[str, Tensor]]
    dropped: tuple[Range, ...] = ()
    skips: int = 0


@dataclass
class _Nobody:
    """In place of a run's lifetime and checkpointer: nobody asks to stop, and nothing is stored."""

    clock: Clock = field(default_factory=Clock)
    stop: bool = False

    def flags(self) -> Sequence[bool]:
        return ()

    def before_update(self) -> None:
        """Nothing is being copied."""


class Bench:
    """One attempt's config, model and optimizer. Its fields are those of a `Run` that a step uses.

    world_size: how many processes the attempt had, by which batch.per_process_size counts.
    """

    def __init__(self, config: Config, source: Source, world: World, world_size: int) -> None:
        self.config, self.source, self.world = config, source, world
        model = build(config, source.vocabulary.size)
        alone = config
        if config.batch.per_process_size is not None:
            whole = {"global_size": config.global_size(world_size), "per_process_size": None}
            alone = config.model_copy(update={"batch": config.batch.model_copy(update=whole)})
        self.compute: Compute = build_compute(alone, source, model, world)
        prepare(config, model)
        self.reduction = make_reduction(config, self.compute, world)
        self.stats = StatsExchange(world, self.compute.plan.microbatches, flags=1)
        self.lifetime = self.checkpointer = _Nobody()
        self.audit = None
        self.times = StepTimes(self.lifetime.clock, world.device)
        self.mine = range(self.compute.plan.microbatches)
        self.batches: Iterator[Sequence[Tensor]] = iter(())

    def load(self, saved: Saved) -> None:
        """Raises UserError if the state is one of another model."""
        model, guard = self.compute.model, self.compute.update.guard
        expected = {k: (v.shape, v.dtype) for k, v in model.state_dict().items()}
        if problems := misfits(expected, {k: (v.shape, v.dtype) for k, v in saved.state["model"].items()}):
            raise UserError(f"the state of step {saved.step} is one of another model: {problems[0]}: set the keys back")
        model.load_state_dict(saved.state["model"])
        self.compute.update.load(saved.state["optimizer"])
        guard.skips.fill_(saved.skips)
        guard.dropped = merged([*guard.dropped, *saved.dropped])
        self.compute.plan = replace(self.compute.plan, dropped=guard.dropped)

    def state(self) -> dict[Kind, dict[str, Tensor]]:
        """All of it, whole: a world of one shares it with nobody. The tensors themselves, not copies."""
        state = self.compute.state()
        return {kind: {n: t for n, t in ts.items() if isinstance(t, Tensor)} for kind, ts in state.items()}

    def gradient(self, name: str) -> Tensor:
        """A parameter's, of the step that was just done; clipped."""
        i, slot = self.compute.update.slots[name]
        return self.compute.update.buckets[i].view(self.reduction.sums[i], slot)

    def save(self, step: int) -> Saved:
        copies = {kind: {n: t.detach().clone() for n, t in tensors.items()} for kind, tensors in self.state().items()}
        guard = self.compute.update.guard
        return Saved(step, copies, guard.dropped, int(guard.skips))

    def microbatches(self, step: int, drop: frozenset[int] = frozenset()) -> list[Microbatch]:
        """Those of step number `step`, counted from 0. drop: positions in the batch whose targets do not count.

        So the mean is that over the targets of all others, and the others' dropout is as it was.
        """
        ids, size = self.compute.plan.sample_ids(step).tolist(), self.compute.plan.micro_size
        found = [self.source.train[ids[first : first + size]] for first in range(0, len(ids), size)]
        for position in drop:
            tokens, targets, *rest = found[position // size]
            targets = targets.clone()
            targets[position % size] = IGNORE
            found[position // size] = (tokens, targets, *rest)
        return found

    def step(self, step: int, drop: frozenset[int] = frozenset()) -> Figures:
        """Do step number `step`, counted from 0."""
        self.batches = iter(self.microbatches(step, drop))
        stats = train_step(cast("Run", self), step)  # it has the fields that a step uses
        figures = DelayedRead(step, flags=1, late=False)(step + 1, stats, self.compute.update.guard.skips)
        return figures

    def to_device(self, microbatch: Microbatch) -> list[Tensor]:
        return [x.to(self.world.device) for x in microbatch]

    def seed(self, step: int, microbatch: int) -> None:
        """Draw the dropout of this microbatch again."""
        torch.manual_seed(self.compute.plan.dropout_seed(step, microbatch))
