"""Publishes the events of an attempt: its start, each step, its end."""

import socket
from collections import deque
from typing import TYPE_CHECKING

from mingpt.config.schema import Config
from mingpt.console import say
from mingpt.model.language import LanguageModel
from mingpt.observe.events import AttemptEnded, AttemptFailed, AttemptStarted, Observers, StepDone
from mingpt.observe.ledger import STEPS
from mingpt.observe.speed import flops_per_token, peak_flops, peak_memory
from mingpt.redact import without_secrets
from mingpt.train.stats import Figures
from mingpt.world.failures import classify
from mingpt.world.lifetime import Lifetime, Phase
from mingpt.world.world import World

if TYPE_CHECKING:
    from mingpt.train.run import Compute, Run

STARTING = ("import", "data", "rendezvous", "load")  # the clock's phases before the first step


class Reporter:
    """Remembers the last logged steps and the training time up to them, from which the next averages follow.

    peak: tokens a second if all devices did what they can; None: not known.
    """

    def __init__(
        self, config: Config, observers: Observers, world: World, lifetime: Lifetime, compute: "Compute", start: int
    ) -> None:
        self.train, self.observers, self.world, self.lifetime = config.train, observers, world, lifetime
        self.update, self.start, self.done = compute.update, start, start
        self.tokens_per_step = compute.plan.global_size * config.model.block_size
        self.marks = deque([(start, 0.0)], maxlen=2)  # logged steps, and the seconds of training up to them
        self.first = start, 0.0  # the first step of this attempt, and the seconds up to its end
        flops = peak_flops(world.device, config.precision)
        self.peak = None
        if flops and isinstance(compute.model, LanguageModel):
            shape, parameters = compute.model.config, sum(p.numel() for p in compute.model.parameters())
            cost = flops_per_token(parameters, shape.n_layer, shape.n_embd, shape.block_size)
            self.peak = flops * world.size / cost

    def started(self, run: "Run") -> None:
        event = AttemptStarted(
            attempt=run.record.attempt,
            start=run.start,
            last_step=run.last_step,
            world_size=self.world.size,
            device=run.compute.device_name(),
            host=socket.gethostname(),
        )
        self.observers.publish(event)

    def step(self, figures: Figures) -> None:
        clock, self.done = self.lifetime.clock, figures.step
        if self.done == self.start + 1:
            self.lifetime.phase = Phase.TRAINING
            if self.world.is_main:
                parts = {name: clock.seconds(name) for name in STARTING} | {"first step": self._trained()}
                say("start: " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in parts.items()))
            clock.enter("step")  # the first one is counted as "compile" if the model is compiled
            self.first = self.done, sum(clock.account().values())
        with clock.within("report"):
            self.observers.publish(self._done(figures))

    def _done(self, figures: Figures) -> StepDone:
        step, last, trained = figures.step, self.train.max_steps, self._trained()
        logged = step % self.train.log_every == 0 or step == last
        before, seconds = self.marks[-1 if logged else 0]  # not logged: a longer time, so that a display is steady
        step_seconds = (trained - seconds) / (step - before)
        if logged:
            self.marks.append((step, trained))
        speed, (first, until) = self.tokens_per_step / step_seconds, self.first
        elapsed = sum(self.lifetime.clock.account().values()) - until
        pace = elapsed / (step - first) if step > first else step_seconds  # with evaluations and snapshots
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
            tokens_seen=step * self.tokens_per_step,
            seconds_left=(last - step) * pace,
            peak_memory=peak_memory(self.world.device),
            mfu=speed / self.peak if self.peak else None,
            world_size=self.world.size,
        )

    def _trained(self) -> float:
        return sum(map(self.lifetime.clock.seconds, STEPS))

    def end(self, done: int, finished: bool, digest: str | None) -> None:
        self.lifetime.ending = True
        self.observers.publish(AttemptEnded(done, finished, digest))

    def failed(self, error: BaseException) -> None:
        self.lifetime.ending = True
        failure = classify(error, self.lifetime.phase)
        reason = str(without_secrets(failure.reason))
        self.observers.publish(AttemptFailed(self.done, failure.code, type(error).__name__, reason))
