"""Opens the observers of an attempt, and publishes its events: its start, each step, its end."""

import socket
import sys
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console

from mingpt.compute.batches import BatchPlan
from mingpt.compute.mixture import MixedPlan
from mingpt.compute.numerics import slow_precision
from mingpt.compute.tree import shares
from mingpt.config.schema import Config
from mingpt.console import counted, say
from mingpt.data.mixture import MixedSamples
from mingpt.data.source import Source, sampled_split
from mingpt.data.windows import WindowDataset
from mingpt.model.language import LanguageModel
from mingpt.observe.console import ConsoleLines
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
from mingpt.observe.jsonl import MetricsLog
from mingpt.observe.ledger import STARTING, Accountant
from mingpt.observe.live import LiveLine
from mingpt.observe.notify import Alarms, notify
from mingpt.observe.own import OwnObserver
from mingpt.observe.profile import Profile
from mingpt.observe.speed import flops_per_token, peak_flops, peak_memory
from mingpt.observe.stragglers import Stragglers
from mingpt.observe.trace import SameBits, Trace
from mingpt.observe.trackers import open_trackers
from mingpt.snapshot.attempts import RunRecord
from mingpt.snapshot.checkpointer import Checkpointer
from mingpt.train.context import StepContext
from mingpt.train.evaluation import evaluated_part
from mingpt.train.figures import Figures
from mingpt.world.failures import classify
from mingpt.world.lifetime import Lifetime, Phase


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
    """Remembers the last logged steps and the training time up to them, from which the next averages follow.

    The training time is the sum of the steps' own seconds, whenever they are read, without what came between them.

    peak: tokens a second if all devices did what they can; None: not known.
    """

    def __init__(
        self, config: Config, observers: Observers, context: StepContext, lifetime: Lifetime, start: int, attempt: int
    ) -> None:
        self.config, self.observers, self.context, self.lifetime = config, observers, context, lifetime
        self.train, self.world, self.update, self.attempt = config.train, context.world, context.update, attempt
        self.start, self.done = start, start
        self.trained = 0.0  # seconds of the steps so far
        self.marks = deque([(start, 0.0)], maxlen=2)  # logged steps, and the seconds of training up to them
        self.pace = Pace(max(100, self.train.eval_every, config.snapshot.every_steps))
        flops = peak_flops(context.device, config.precision)
        self.peak = None
        if flops and isinstance(context.model, LanguageModel):
            shape, parameters = context.model.config, sum(p.numel() for p in context.model.parameters())
            cost = flops_per_token(parameters, shape.n_layer, shape.n_embd, shape.block_size)
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
        if not self.world.is_main:
            return
        plan, world, model = self.context.plan, self.world, self.context.model
        least = f"{plan.micro_size >> len(plan.double_at)} to " if plan.double_at else ""
        say(
            f"attempt {self.attempt}: steps {self.start + 1} to {self.train.max_steps}, "
            f"{counted(world.size, 'process')} on {device.type} ({world.backend}), "
            f"{counted(plan.microbatches, 'microbatch')} of {least}{plan.micro_size} x {self.config.model.block_size} "
            f"tokens, {sum(p.numel() for p in model.parameters()):,} parameters"
        )
        if self.config.reduce == "fast":
            say("reduce=fast: equal bits for another number of processes are not promised")
        for line in (slow_precision(self.config, device), *proportions(plan, source, self.config)):
            if line:
                say(line)

    def step(self, figures: Figures) -> None:
        clock, self.done = self.lifetime.clock, figures.step
        if self.done == self.start + 1:
            self.lifetime.phase = Phase.TRAINING
            if self.world.is_main:
                parts = {name: clock.seconds(name) for name in STARTING} | {"first step": figures.seconds}
                say("start: " + ", ".join(f"{part} {spent:.2f} s" for part, spent in parts.items() if spent > 0.005))
            clock.enter("step")  # the first one is counted as "compile" if the model is compiled
            self.pace.mark(self.done, self.context.plan.seen(self.done), self._awake())
        if self.world.is_main and not figures.tokens:
            say(f"WARNING: step {self.done}: no target of its samples counts: its loss says nothing, nothing is learnt")
        self.trained += figures.seconds
        with clock.within("report"):
            self.observers.publish(self._done(figures))

    def _done(self, figures: Figures) -> StepDone:
        step, last, trained, plan = figures.step, self.train.max_steps, self.trained, self.context.plan
        logged = step % self.train.log_every == 0 or step == last
        before, seconds = self.marks[-1 if logged else 0]  # not logged: a longer time, so that a display is steady
        step_seconds = (trained - seconds) / (step - before)
        if logged:
            self.marks.append((step, trained))
        block, done = self.config.model.block_size, plan.seen(step)
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
        self.lifetime.ending = True
        self.observers.publish(AttemptEnded(done, finished, digest))

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


def begin_snapshots(checkpointer: Checkpointer, record: RunRecord, observers: Observers) -> None:
    """Have snapshots written, and what becomes of them published."""
    checkpointer.begin(
        record,
        committed=lambda *what: observers.publish(SnapshotCommitted(*what)),
        committed_hot=lambda step: observers.publish(HotCommitted(step)),
        lost=lambda *what: observers.publish(SnapshotLost(*what)),
    )


def open_observers(config: Config, record: RunRecord, context: StepContext, lifetime: Lifetime) -> Observers:
    """The observers of rank 0; none in other processes. Called by all processes."""
    world = context.world
    hosts = world.gather(socket.gethostname())
    if not world.is_main:
        return Observers([], say)
    run_dir, price = config.run.dir, config.run.price_per_hour
    live, hook, steps = live_line(), config.health.notify, config.profile.steps
    metrics = MetricsLog(run_dir, record.attempt, say)
    observers = Observers(
        [
            SameBits(config, record, metrics.write, lambda event: observers.publish(event), say),
            *([Alarms(hook, config.run.name, record.attempt, say)] if hook else []),
            *live,
            ConsoleLines(config.train.max_steps, say, live=bool(live)),
            Trace(run_dir, record.attempt, say),
            metrics,
            *stragglers(config, context, hosts),
            Accountant(run_dir, lifetime.clock, price, say),
            *([Profile(steps, run_dir, record.attempt, world.device.type == "cuda", say)] if steps else []),
            *open_trackers(config, record, say),
            *(OwnObserver(own, say, run_dir=run_dir, attempt=record.attempt) for own in config.observers),
        ],
        say,
    )
    return observers


def stragglers(config: Config, context: StepContext, hosts: Sequence[str]) -> list[Stragglers]:
    ratio = config.health.straggler_ratio
    if not ratio or len(hosts) == 1:
        return []
    counts = [*map(len, shares(*context.world.shape, context.plan.microbatches))]
    return [Stragglers(hosts, counts, ratio, say)]


def live_line() -> list[LiveLine]:
    """The live display, if somebody looks: on a terminal, and not in a log."""
    console = Console(file=sys.stdout)
    return [LiveLine(console)] if sys.stdout.isatty() and not console.is_dumb_terminal else []


MANY_EPOCHS = 50  # with more, a model memorises its data


def proportions(plan: BatchPlan, source: Source, config: Config) -> Iterator[str]:
    """One line of figures of each data set, and a WARNING for each that looks like an error."""
    steps = config.train.max_steps
    sets = [("", source.train, plan.seen(steps) / steps)]
    if isinstance(plan, MixedPlan) and isinstance(source.train, MixedSamples):
        shown = zip(source.train.parts, plan.shown(steps), strict=True)
        sets = [(f" of {key}", samples, number / steps) for (key, _, samples), number in shown]
    for of, samples, taken in sets:
        what, size = "samples", len(samples)
        if isinstance(samples, WindowDataset):  # its samples overlap, so tokens are counted
            what, size, taken = "tokens", samples.stop - samples.start, taken * config.model.block_size
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
