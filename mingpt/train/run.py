"""What the training loop uses, built once per attempt (session.py).

`mine`, `batches`, `reduction` and `observers` (empty except in rank 0) differ between processes; the rest is equal.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from mingpt.compute.batches import BatchPlan
from mingpt.compute.buckets import Sliced
from mingpt.compute.optimizer import Update
from mingpt.compute.reduction import Reduction
from mingpt.config.schema import Config
from mingpt.config.section import Own
from mingpt.data.source import Source
from mingpt.model.language import LanguageModel
from mingpt.observe.events import Evaluated, Observers
from mingpt.snapshot.attempts import RunRecord
from mingpt.snapshot.checkpointer import Checkpointer, Content
from mingpt.snapshot.format import Metrics, SharedState
from mingpt.train import own_model, tasks
from mingpt.train.evaluation import byte_lengths, evaluate
from mingpt.train.reporter import Reporter
from mingpt.train.stats import DelayedRead, Figures, StatsExchange, StepStats
from mingpt.train.times import StepTimes
from mingpt.world.clock import Clock
from mingpt.world.lifetime import Lifetime
from mingpt.world.world import World

if TYPE_CHECKING:
    from mingpt.train.audit import Audit
    from mingpt.train.bad_steps import BadSteps


@dataclass
class Compute:
    """What computes a step. autocast: the context manager of config.precision."""

    model: nn.Module
    update: Update
    plan: BatchPlan
    autocast: Any
    device: torch.device

    def device_name(self) -> str:
        """The kind of machine, such as "NVIDIA L4" or "cpu"."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    def state(self) -> SharedState:
        """All state of the run; the tensors themselves, not copies."""
        weights: dict[str, Tensor | Sliced] = self.model.state_dict()
        for packing in self.update.gathering.packings.values():
            weights |= packing.own()
        return {"model": weights, "optimizer": self.update.state()}


@dataclass
class Evaluation:
    """Evaluates the model when due. val_loss: in nats per target, of the step just done; None if it was not due.

    stop: whether this process is asked to stop.
    """

    compute: Compute
    config: Config
    source: Source
    world: World
    clock: Clock
    observers: Observers
    best_val_loss: float
    val_loss: float | None = None
    stop: Callable[[], bool] = lambda: False

    def after_step(self, done: int, last: bool) -> bool:
        """Evaluate if due; returns whether the validation loss is the lowest so far."""
        every, self.val_loss = self.config.train.eval_every, None
        if tasks.due(self.config.train, done, last):
            with self.clock.within("evaluation"):
                model, autocast = cast(LanguageModel, self.compute.model), self.compute.autocast
                vocabulary = self.source.vocabulary
                found = tasks.after_step(done, model, self.config, vocabulary, self.world, autocast, self.stop)
                if found is not None:
                    self.observers.publish(found)
        if not len(self.source.validation) or not (last or (every and done % every == 0)):
            return False
        with self.clock.within("evaluation"):
            figures = evaluate(
                self.compute.model,
                self.source.validation,
                self.world,
                self.compute.autocast,
                self.source.answer_length,
                self.byte_lengths,
                seed=self.config.seed,
                step=done,
                most=self.config.train.most_eval_batches(self.config.batch),
                publish=self.observers.publish,
            )
            self.val_loss, best = figures.loss, figures.loss < self.best_val_loss
            self.best_val_loss = figures.loss if best else self.best_val_loss
            parts = {name: part.loss for name, part in figures.parts.items()}
            bits = figures.bits_per_byte
            event = Evaluated(done, figures.loss, self.best_val_loss, figures.right, figures.questions, parts, bits)
            self.observers.publish(event)
        return best

    @cached_property
    def byte_lengths(self) -> list[int]:
        return byte_lengths(self.source.vocabulary)


@dataclass
class Run:
    """One attempt.

    start: the number of steps done before it. mine: indices of this process's microbatches in each step.
    batches: their tensors, in order. buffers: copies of the model's buffers from before the first step.
    """

    config: Config
    source: Source
    world: World
    lifetime: Lifetime
    compute: Compute
    reduction: Reduction
    stats: StatsExchange
    times: StepTimes
    read: DelayedRead
    mine: range
    batches: Iterator[Sequence[Tensor]]
    buffers: dict[str, Tensor]
    checkpointer: Checkpointer
    evaluation: Evaluation
    bad_steps: "BadSteps"
    audit: "Audit | None"
    observers: Observers
    reporter: Reporter
    record: RunRecord
    start: int

    @property
    def last_step(self) -> int:
        return self.config.train.max_steps

    def take_note(self, figures: Figures, ending: bool) -> None:
        """Publish a step's figures; at the end also late ones. Raises RolledBack or UserError for bad steps."""
        for known in (figures, self.read.last() if ending else None):
            if known and known.losses:  # on CUDA the first call has none
                self.reporter.step(known)
                self.bad_steps.check(known)

    def content(self, stats: StepStats) -> Content:
        """What a snapshot after this step holds. Waits for the device."""
        best = self.evaluation.best_val_loss
        metrics = Metrics.of(
            loss=stats.mean_loss(),
            val_loss=self.evaluation.val_loss,
            best_val_loss=best if math.isfinite(best) else None,
        )
        return self.compute.state(), metrics

    def check_buffers(self) -> None:
        """Raise UserError if the buffers of a user's model have changed: they would depend on the world size."""
        if isinstance(self.config.model, Own):
            own_model.check_buffers(self.compute.model, self.buffers, self.config.model, self.world)
