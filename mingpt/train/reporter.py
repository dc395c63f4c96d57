"""Opens the observers of an attempt, and publishes its events: its start, each step, its end."""

import socket
from collections import deque

import torch

from mingpt.config.schema import Config
from mingpt.console import say
from mingpt.data.source import Source
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
from mingpt.redact import without_secrets
from mingpt.train.announcing import announce
from mingpt.train.context import StepContext
from mingpt.train.figures import Figures
from mingpt.world.failures import classify
from mingpt.world.lifetime import Lifetime


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
        if self.world.is_main:
            announce(self.config, self.context, source, self.attempt, self.start)

    def step(self, figures: Figures) -> None:
        clock, self.done = self.lifetime.clock, figures.step
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

    def committed(self, step: int, digest: str, seconds: float) -> None:
        self.observers.publish(SnapshotCommitted(step, digest, seconds))

    def committed_hot(self, step: int) -> None:
        self.observers.publish(HotCommitted(step))

    def lost(self, step: int, in_a_row: int, reason: str) -> None:
        self.observers.publish(SnapshotLost(step, in_a_row, reason))

    def failed(self, error: BaseException) -> None:
        self.lifetime.ending = True
        failure = classify(error, self.lifetime.phase)
        reason = str(without_secrets(failure.reason))
        self.observers.publish(AttemptFailed(self.done, failure.code, type(error).__name__, reason))

    def report_hang(self, error: BaseException) -> None:
        """In rank 0 its observers do; in others an alarm, for a rank 0 that is silent."""
        if self.world.is_main:
            self.failed(error)
        else:
            notify(self.config.health.notify, "hang", str(error), self.config.run.name, self.attempt, self.done)
