"""Computes single steps outside of a run, with `train_step` in a world of one. Nothing is written."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mingpt.compute.guard import Range
from mingpt.compute.layout import layout_of, misfits
from mingpt.config.schema import Config
from mingpt.data.source import Microbatch, Source
from mingpt.errors import UserError
from mingpt.model.language import IGNORE
from mingpt.snapshot.format import Kind
from mingpt.train.factory import build
from mingpt.train.figures import DelayedRead, Figures
from mingpt.train.setup import context_of, place_model
from mingpt.train.step import train_step
from mingpt.world.world import World

State = dict[Kind, dict[str, Tensor]]  # by kind and name


@dataclass(frozen=True)
class Saved:
    """Copies of the state after `step` steps."""

    step: int
    state: State
    # Batches that are shown no more.
    dropped: tuple[Range, ...] = ()
    # How many steps up to this one were skipped in a row.
    skips: int = 0


class Bench:
    """One attempt's config, data, and what computes its steps, in a world of one.

    world_size: how many processes the attempt had, by which batch.per_process_size counts.
    """

    def __init__(self, config: Config, source: Source, world: World, world_size: int) -> None:
        self.config, self.source, self.world = config, source, world
        alone = config
        # With batch.per_process_size the batch depends on the world: this one is that of the attempt's.
        if config.batch.per_process_size is not None:
            whole = {"global_size": config.global_size(world_size), "per_process_size": None}
            alone = config.model_copy(update={"batch": config.batch.model_copy(update=whole)})
        model = build(config, source.vocabulary.size)
        place_model(config, source, model, world)
        self.context = context_of(alone, source, model, world)

    def load(self, saved: Saved) -> None:
        """Raises UserError if the state is one of another model."""
        model, guard = self.context.model, self.context.update.guard
        if problems := misfits(layout_of(model.state_dict()), layout_of(saved.state["model"])):
            raise UserError(f"the state of step {saved.step} is one of another model: {problems[0]}: set the keys back")
        model.load_state_dict(saved.state["model"])
        self.context.update.load(saved.state["optimizer"])
        # No state unless the config looks for spikes, so it is not among the tensors.
        guard.skips.fill_(saved.skips)
        self.context.drop(saved.dropped)

    def state(self) -> State:
        """All of it, whole: a world of one shares it with nobody. The tensors themselves, not copies."""
        whole = State()
        for kind, tensors in self.context.state().items():
            whole[kind] = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
        return whole

    def gradient(self, name: str) -> Tensor:
        """A parameter's gradient in the step that was just done, after clipping."""
        i, slot = self.context.update.slots[name]
        return self.context.update.buckets[i].view(self.context.reduction.sums[i], slot)

    def save(self, step: int) -> Saved:
        copies = State()
        for kind, tensors in self.state().items():
            copies[kind] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        guard = self.context.update.guard
        return Saved(step, copies, guard.dropped, int(guard.skips))

    def microbatches(self, step: int, drop: frozenset[int]) -> list[Microbatch]:
        """The data of step number `step`, counted from 0. drop: positions in the batch whose targets do not count.

        So the mean is that over the targets of all others, and the others' dropout is as it was.
        """
        samples = self.context.plan.by_microbatch(step)
        batch = [self.source.train[ids] for ids in samples]
        # Left in the batch, with targets that do not count: other rows would get another dropout without them.
        for position in drop:
            m, row = divmod(position, len(samples[0]))
            tokens, targets, *rest = batch[m]
            targets = targets.clone()
            targets[row] = IGNORE
            batch[m] = (tokens, targets, *rest)
        return batch

    def step(self, step: int, drop: frozenset[int] = frozenset()) -> Figures:
        """Do step number `step`, counted from 0."""
        read = DelayedRead(self.context.update.guard.skips, late=False)
        read.begin()
        stats = train_step(self.context, step, iter(self.microbatches(step, drop)))
        (figures,) = read.ready(step + 1, stats, drain=True)
        return figures

    def to_device(self, microbatch: Microbatch) -> list[Tensor]:
        return [x.to(self.world.device) for x in microbatch]

    def seed(self, step: int, microbatch: int) -> None:
        """Draw the dropout of this microbatch again."""
        torch.manual_seed(self.context.plan.dropout_seed(step, microbatch))
