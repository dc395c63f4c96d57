"""Publishes an attempt's events: its start, each step, its end. At its start it says what it will compute, and which of
its figures look like an error.
"""

import socket
from collections import deque
from collections.abc import Iterator

import torch

from mingpt.cli.console import counted, say
from mingpt.compute.batches import BatchPlan
from mingpt.compute.mixture import MixedPlan
from mingpt.compute.numerics import slow_precision
from mingpt.config.schema import Config
from mingpt.data.mixed import MixedSamples
from mingpt.data.source import Source, sampled_split
from mingpt.data.windows import WindowDataset
from mingpt.model.language import LanguageModel
from mingpt.observe.events import (
    AttemptEnded,
    AttemptFailed,
    AttemptStarted,
    HotCommitted,
    Observers,
    SnapshotCommitted,
    SnapshotLost,
    StepDone,
)
from mingpt.observe.ledger import STARTING
from mingpt.observe.notify import notify
from mingpt.observe.speed import flops_per_token, peak_flops, peak_memory
from mingpt.train.context import StepContext
from mingpt.train.evaluation import evaluated_part
from mingpt.train.figures import Figures
from mingpt.world.failures import classify
from mingpt.world.lifetime import Lifetime

MANY_EPOCHS = 50  # with more, a model memorises its data


class Pace:
    """Seconds a sample, with evaluations and snapshots: a mean over the last `window` steps, which have one of each."""

    def __init__(self, window: int) -> None:
        self.window, self.marks = window, deque[tuple[int, int, float]]()

    def mark(self, step: int, seen: int, seconds: float) -> None:
        """seen: samples up to this step. seconds: of the attempt up to its end."""
        self.marks.append((step, seen, seconds))
        while len(self.marks) > 1 and self.marks[1][0] <= step - self.window:
            self.marks.popleft()

    def of(self, seen: int, seconds: float) -> float | None:
        """Up to now; None: only one step was done."""
        _, before, since = self.marks[0]
        return (seconds - since) / (seen - before) if seen > before else None


class Reporter:
    """Publishes an attempt's events, and computes the averages that a step's event has.

    It hears from the checkpointer, too, in that one's threads (`tiers.checkpointer.Listener`).
    """

    def __init__(
        self, config: Config, observers: Observers, context: StepContext, lifetime: Lifetime, start: int, attempt: int
    ) -> None:
        self.config, self.train = config, config.train
        self.observers = observers
        self.context, self.world, self.update = context, context.world, context.update
        self.lifetime = lifetime
        self.attempt = attempt
        # Steps done before this attempt, and so far.
        self.start = start
        self.done = start
        # Seconds of the steps so far: the sum of their own, whenever they are read, without what came between them.
        self.trained = 0.0
        # The last two logged steps, and the seconds of training up to them. Averages are over what came since.
        self.marks = deque([(start, 0.0)], maxlen=2)
        # So long that each window has an evaluation and a snapshot: by the last steps' speed alone, the time left
        # jumped between 7 and 9 hours.
        self.pace = Pace(max(100, self.train.eval_every, config.snapshot.every_steps))
        # Tokens a second if all devices did what they can; None: not known.
        self.peak = None
        flops = peak_flops(context.device, config.precision)
        if flops and isinstance(context.model, LanguageModel):
            shape = context.model.config
            cost = flops_per_token(context.parameters, shape.n_layer, shape.n_embd, shape.block_size)
            self.peak = flops * self.world.size / cost

    def started(self, source: Source) -> None:
        """Say what this attempt will compute, and on which devices."""
        device = self.context.device
        event = AttemptStarted(
            attempt=self.attempt,
            start=self.start,
            last_step=self.train.max_steps,
            world_size=self.world.size,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            host=socket.gethostname(),
        )
        self.observers.publish(event)
        if self.world.is_main:
            announce(self.config, self.context, source, self.attempt, self.start)

    def step(self, figures: Figures) -> None:
        """Publish a step's figures. On CUDA it is called during the step after it."""
        clock = self.lifetime.clock
        self.done = figures.step
        if self.done == self.start + 1:
            if self.world.is_main:
                parts = {name: clock.seconds(name) for name in STARTING} | {"first step": figures.seconds}
                say("start: " + ", ".join(f"{part} {spent:.2f} s" for part, spent in parts.items() if spent > 0.005))
            self.pace.mark(self.done, self.context.plan.seen(self.done), self._awake())
        if self.world.is_main and not figures.tokens:
            say(f"WARNING: step {self.done}: no target of its samples counts: its loss says nothing, nothing is learnt")
        self.trained += figures.seconds
        with clock.within("report"):
            self.observers.publish(self._done(figures))

    def _done(self, figures: Figures) -> StepDone:
        plan, trained = self.context.plan, self.trained
        step, last = figures.step, self.train.max_steps
        logged = step % self.train.log_every == 0 or step == last
        # Since the last logged step; of a step that is not logged over a longer time, so that a display is steady.
        before, seconds = self.marks[-1 if logged else 0]
        step_seconds = (trained - seconds) / (step - before)
        if logged:
            self.marks.append((step, trained))
        block = self.config.model.block_size
        # Samples, not steps: with batch.double_at a step's size changes.
        done = plan.seen(step)
        speed = (done - plan.seen(before)) * block / (trained - seconds)
        awake = self._awake()
        pace = self.pace.of(done, awake) or block / speed
        if logged:
            self.pace.mark(step, done, awake)
        return StepDone(
            step=step,
            loss=figures.loss,
            grad_norm=figures.grad_norm,
            busy=tuple(figures.busy),
            waited=tuple(figures.waited),
            logged=logged,
            lr=self.update.lr(step - 1),
            tokens_per_second=speed,
            step_seconds=step_seconds,
            tokens_seen=done * block,
            seconds_left=(plan.seen(last) - done) * pace,
            peak_memory=peak_memory(self.world.device),
            mfu=speed / self.peak if self.peak else None,
            world_size=self.world.size,
        )

    def _awake(self) -> float:
        """Seconds of this attempt, without those in which its process was stopped."""
        return sum(self.lifetime.clock.account().values()) - self.lifetime.clock.paused()

    def end(self, done: int, finished: bool, digest: str | None) -> None:
        # For the watchdog: observers have a limit of their own at the end, and one that takes it is no hang.
        self.lifetime.ending = True
        self.observers.publish(AttemptEnded(done, finished, digest))

    def committed(self, step: int, digest: str, seconds: float) -> None:
        self.observers.publish(SnapshotCommitted(step, digest, seconds))

    def committed_hot(self, step: int) -> None:
        self.observers.publish(HotCommitted(step))

    def lost(self, step: int, in_a_row: int, reason: str) -> None:
        self.observers.publish(SnapshotLost(step, in_a_row, reason))

    def failed(self, error: BaseException) -> None:
        self.lifetime.ending = True
        failure = classify(error, self.lifetime.phase)
        self.observers.publish(AttemptFailed(self.done, failure.code, type(error).__name__, failure.reason))

    def report_hang(self, error: BaseException) -> None:
        """In rank 0 its observers do; in others an alarm, for a rank 0 that is silent."""
        if self.world.is_main:
            self.failed(error)
        else:
            notify(self.config.health.notify, "hang", str(error), self.config.run.name, self.attempt, self.done)


def announce(config: Config, context: StepContext, source: Source, attempt: int, start: int) -> None:
    """Say it in lines of the log. start: steps done before. Called by rank 0."""
    plan, world = context.plan, context.world
    least = f"{plan.micro_size >> len(plan.double_at)} to " if plan.double_at else ""
    say(
        f"attempt {attempt}: steps {start + 1} to {config.train.max_steps}, "
        f"{counted(world.size, 'process')} on {context.device.type} ({world.backend}), "
        f"{counted(plan.microbatches, 'microbatch')} of {least}{plan.micro_size} x {config.model.block_size} "
        f"tokens, {context.parameters:,} parameters"
    )
    if config.reduce == "fast":
        say("reduce=fast: equal bits for another number of processes are not promised")
    if slow := slow_precision(config, context.device):
        say(slow)
    for line in proportions(plan, source, config):
        say(line)


def proportions(plan: BatchPlan, source: Source, config: Config) -> Iterator[str]:
    """One line of figures of each data set, and a WARNING for each that looks like an error."""
    steps = config.train.max_steps
    sets = [("", source.train, plan.seen(steps) / steps)]
    if isinstance(plan, MixedPlan) and isinstance(source.train, MixedSamples):
        shown = zip(source.train.parts, plan.shown(steps), strict=True)
        sets = [(f" of {key}", samples, number / steps) for (key, _, samples), number in shown]
    for of, samples, taken in sets:
        what, size = "samples", len(samples)
        if isinstance(samples, WindowDataset):
            # A window begins at each token, so there are about as many samples as tokens: those say nothing of epochs.
            what = "tokens"
            size = samples.stop - samples.start
            taken *= config.model.block_size
        epochs = steps * taken / size
        yield (
            f"data: {count(size)} {what}{of}, {count(round(taken))} a step, "
            f"{epochs:,.{1 if epochs < 100 else 0}f} epochs"
        )
        if epochs > MANY_EPOCHS:
            yield (
                f"WARNING: {epochs:,.0f} epochs{of}: a model that sees its data so often learns it by heart: take more "
                f"data, or lower train.max_steps"
            )
    if len(split := source.validation):
        part, total = evaluated_part(split, config.train.eval_batches), sampled_split(split).size
        every = min(config.train.eval_every or steps, steps)
        work = len(part) / (3 * every * plan.microbatches)  # forward alone is a third of a step
        which = f"all {total:,}" if part.size == total else f"{part.size:,} of {total:,}"
        yield (
            f"validation: {which} samples every {counted(every, 'step')}, about {work / (1 + work):.0%} of the time "
            f"(train.eval_batches)"
        )
    if config.schedule.warmup_steps >= config.train.max_steps:
        yield (
            f"WARNING: schedule.warmup_steps={config.schedule.warmup_steps}, but train.max_steps="
            f"{config.train.max_steps}: the learning rate never reaches optimizer.lr"
        )


def count(number: int) -> str:
    return f"{number / 1e9:,.1f} G" if number >= 1e9 else f"{number / 1e6:,.1f} M" if number >= 1e6 else f"{number:,}"
