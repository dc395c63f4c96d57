"""Evaluates a model on a split or samples all over it: its loss, and its accuracy if the samples have labels.

The figures do not depend on the world size. Losses are added along one tree. Counts are added in the order of the
microbatches, since they are fractions where targets have weights.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mingpt.compute.batches import derive
from mingpt.compute.stats import StepStats
from mingpt.compute.tree import tree_sum_of
from mingpt.config.schema import Config
from mingpt.config.section import Own
from mingpt.data.mixed import MixedSplit
from mingpt.data.source import EvalSplit, SampledSplit, Source, Spelling, TextVocabulary, Vocabulary, sampled_split
from mingpt.errors import UserError
from mingpt.model.language import IGNORE, LanguageModel
from mingpt.model.sampling import generate_stream
from mingpt.observe.events import Evaluated, Evaluating, Observers, Sampled
from mingpt.snapshot.format import Metrics
from mingpt.train.context import StepContext
from mingpt.world.clock import Clock
from mingpt.world.world import Progress, World, share

# Of a text at most, for which the other processes wait.
SAMPLE_TOKENS = 128
SAMPLE_SECONDS = 20.0
# Of an evaluation, unless the config says otherwise. It costs what a third as many tokens cost in a step, which have a
# backward, too. Enough to tell two runs apart, whose losses are of the same targets. Not a share of the run's time, as
# it was: runs of other lengths or batches were compared on other texts, and ranked the wrong way round by 0.1 nats.
EVAL_TOKENS = 2**17
TEMPERATURE = 0.8  # as `mingpt generate` has it


@runtime_checkable
class HasLogits(Protocol):
    """A model whose accuracy can be measured, where the targets are labels: of shape (batch,)."""

    def loss_and_logits(self, tokens: Tensor, targets: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(sum of the losses, number of targets, logits of shape (batch, classes))."""


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation has found, equal in all processes."""

    # In nats per target; NaN without targets.
    loss: float
    # Their number, or the sum of their weights.
    targets: float
    # Samples that have a label, and those of them that were answered correctly.
    right: int = 0
    questions: int = 0
    # Bytes of the targets' text, each target's times its weight.
    spelled: float = 0.0
    # Of a mixture, each component's own. Its loss as a whole is the mean over all targets, whatever the weights.
    parts: "dict[str, EvalResult]" = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """The share of questions that were answered correctly; None without questions."""
        return self.right / self.questions if self.questions else None

    @property
    def bits_per_byte(self) -> float | None:
        """The split's loss in bits over its text's length in bytes: comparable between vocabularies."""
        return self.loss * self.targets / math.log(2) / self.spelled if self.spelled else None


def byte_lengths(vocabulary: Vocabulary) -> list[int]:
    """See Spelling; empty if its tokens are no text."""
    return vocabulary.byte_lengths() if isinstance(vocabulary, Spelling) else []


def evaluated_part(split: EvalSplit, batches: int | None) -> SampledSplit:
    """What an evaluation while training takes of a split of at least one microbatch. batches: train.eval_batches.

    null: samples with EVAL_TOKENS targets in all, whatever batch.micro_size and the length of the run are, so that the
    losses of runs on the same data can be compared.
    """
    whole = sampled_split(split)
    if batches is not None:
        return whole.evenly(batches * whole.micro_size) if batches else whole
    targets = split[0][1]
    of_sample = targets.numel() // min(len(targets), whole.micro_size)
    return whole.evenly(max(1, EVAL_TOKENS // of_sample))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: EvalSplit,
    world: World,
    autocast: Any,
    byte_lengths: Sequence[int] = (),
    *,
    seed: int,
    step: int,
    publish: Callable[[Evaluating], None] = lambda event: None,
) -> EvalResult:
    """The model's figures on a split of at least one microbatch. Collective: all processes call it and get the same.

    byte_lengths: see Spelling. seed, step: of the run. They seed torch for each microbatch, for models that draw random
    numbers. publish: called after each microbatch of this process.
    """
    model.eval()
    # With a 0 at the end, which IGNORE finds at place -1.
    lengths = torch.tensor([*byte_lengths, 0], device=world.device)
    none = torch.zeros((), device=world.device)
    rows: list[Tensor] = []
    places = share(world.rank, world.size, len(split))
    began = time.monotonic()
    for microbatch in places:
        Progress.microbatches += 1  # for the watchdog: a process that evaluates more slowly than others does not hang
        # From pinned memory the host does not wait for the copy, and launches the microbatch meanwhile.
        cuda = world.device.type == "cuda"
        tensors = [(x.pin_memory() if cuda else x).to(world.device, non_blocking=cuda) for x in split[microbatch]]
        targets, right, questions = tensors[1], none, none
        # By the microbatch's number, not in the order of this process's: its draws must not depend on the world size.
        torch.manual_seed(derive("evaluation", seed, step, microbatch))
        with autocast:
            if targets.ndim == 1 and isinstance(model, HasLogits):
                loss, count, logits = model.loss_and_logits(*tensors)
                labeled = targets != IGNORE
                right, questions = (labeled & (logits.argmax(-1) == targets)).sum(), labeled.sum()
            else:
                loss, count = model(*tensors)
        spelled = none
        if byte_lengths:
            of_targets = lengths[targets.where(targets != IGNORE, -1)]
            spelled = of_targets.sum() if len(tensors) == 2 else (of_targets * tensors[2].double()).sum()
        rows.append(torch.stack([x.double() for x in (loss, count, right, questions, spelled)]))
        publish(Evaluating(step, len(rows) / len(places), time.monotonic() - began))
    # Read only now, all at once: each number that is read on the way would wait for the device.
    mine = torch.stack(rows).tolist() if rows else []
    all_rows = list[list[float]]()
    for rows_of_process in world.gather(mine):
        all_rows += rows_of_process
    parts = split.parts.items() if isinstance(split, MixedSplit) else ()
    return summed(all_rows, {name: summed(all_rows[span.start : span.stop]) for name, span in parts})


def summed(rows: Sequence[Sequence[float]], parts: dict[str, EvalResult] | None = None) -> EvalResult:
    """The figures of some microbatches, in their order."""
    losses, *columns = zip(*rows, strict=True)
    # Losses along the tree, since their sum depends on the order. The others are whole, or sums of a few weights.
    total, (counted, right, asked, length) = tree_sum_of(losses), map(sum, columns)
    return EvalResult(total / counted if counted else math.nan, counted, int(right), int(asked), length, parts or {})


def sample_prompt(config: Config, vocabulary: Vocabulary) -> tuple[TextVocabulary, list[int]]:
    """The vocabulary of train.sample_every's texts, and what they begin with. Raises UserError if there can be none."""
    if isinstance(config.model, Own):
        raise UserError("train.sample_every: it asks a GPT, and model._target_ names another model: leave it out")
    if not isinstance(vocabulary, TextVocabulary) or not isinstance(vocabulary, Spelling):
        kind = vocabulary.to_json()["kind"]
        raise UserError(f"train.sample_every: the model's tokens are no text (a {kind} vocabulary): leave it out")
    prompt = config.train.sample_prompt or "\n"
    try:
        return vocabulary, vocabulary.encode(prompt)
    except UserError as error:
        raise UserError(f"train.sample_prompt={prompt!r}: {error}: set another") from error


def sampled(model: LanguageModel, vocabulary: TextVocabulary, tokens: list[int], autocast: Any, seed: int) -> str:
    """The text of `tokens`, continued in this process alone. Nothing that training computes with is changed by it."""
    until, rows = time.monotonic() + SAMPLE_SECONDS, torch.tensor([tokens], device=next(model.parameters()).device)
    # Eager: other shapes would make the compiler replace what it has for training, and the bits with it.
    with autocast, torch.compiler.set_stance("force_eager"):
        try:
            for token in generate_stream(model, rows, SAMPLE_TOKENS, temperature=TEMPERATURE, seed=seed):
                tokens.append(int(token))
                Progress.microbatches += 1
                if time.monotonic() > until:
                    break
        except FloatingPointError as error:
            return f"no text: {error}"
    return vocabulary.decode(tokens)


@dataclass
class Evaluation:
    """Evaluates the model when due, and has it write a text."""

    context: StepContext
    config: Config
    source: Source
    observers: Observers
    clock: Clock
    best_val_loss: float  # of the run so far; infinite before the first evaluation
    val_loss: float | None = None  # of the step just done, in nats a target; None if it was not due

    def after_step(self, done: int, last: bool) -> bool:
        """Evaluate if due; returns whether the validation loss is the lowest so far."""
        self.val_loss = None
        every, samples = self.config.train.eval_every, self.config.train.sample_every
        model, world, autocast = self.context.model, self.context.world, self.context.autocast
        # Rank 0 alone: all processes have all weights, so a text needs no collective, and the others wait in the next.
        if samples and done % samples == 0 and world.is_main and isinstance(model, LanguageModel):
            with self.clock.within("evaluation"):
                text = sampled(model, *sample_prompt(self.config, self.source.vocabulary), autocast, self.config.seed)
                self.observers.publish(Sampled(done, text))
        # The last step's is always evaluated: its loss is the run's result.
        if not len(self.source.validation) or not (last or (every and done % every == 0)):
            return False
        with self.clock.within("evaluation"):
            figures = evaluate(
                model,
                self.part,
                world,
                autocast,
                self.byte_lengths,
                seed=self.config.seed,
                step=done,
                publish=self.observers.publish,
            )
            self.val_loss, best = figures.loss, figures.loss < self.best_val_loss
            self.best_val_loss = figures.loss if best else self.best_val_loss
            self.observers.publish(
                Evaluated(
                    step=done,
                    val_loss=figures.loss,
                    best=self.best_val_loss,
                    right=figures.right,
                    questions=figures.questions,
                    parts={name: part.loss for name, part in figures.parts.items()},
                    bits_per_byte=figures.bits_per_byte,
                    tokens=figures.targets,
                    share=self.part.size / sampled_split(self.source.validation).size,
                )
            )
        return best

    @cached_property
    def part(self) -> SampledSplit:
        return evaluated_part(self.source.validation, self.config.train.eval_batches)

    @cached_property
    def byte_lengths(self) -> list[int]:
        return byte_lengths(self.source.vocabulary)

    def metrics(self, stats: StepStats) -> Metrics:
        """What a snapshot after this step stores beside the state. Waits for the device."""
        best = self.best_val_loss if math.isfinite(self.best_val_loss) else None
        return Metrics.of(loss=stats.mean_loss(), val_loss=self.val_loss, best_val_loss=best)
