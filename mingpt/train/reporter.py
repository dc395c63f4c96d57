"""Publishes the events of an attempt: its start, each step, its end."""

import socket
from typing import TYPE_CHECKING

from mingpt.compute.optimizer import Update
from mingpt.console import say
from mingpt.observe.events import AttemptEnded, AttemptFailed, AttemptStarted, Observers, StepComputed, StepDone
from mingpt.observe.ledger import STEPS
from mingpt.redact import without_secrets
from mingpt.train.stats import Figures
from mingpt.world.failures import classify
from mingpt.world.lifetime import Lifetime, Phase
from mingpt.world.world import World

if TYPE_CHECKING:
    from mingpt.train.run import Run

STARTING = ("import", "data", "rendezvous", "load")  # the clock's phases before the first step


class Reporter:
    """Remembers the last StepDone and the training time up to it, from which the next one's averages follow."""

    def __init__(
        self, observers: Observers, world: World, lifetime: Lifetime, update: Update, start: int, tokens_per_step: int
    ) -> None:
        self.observers, self.world, self.lifetime, self.update = observers, world, lifetime, update
        self.start, self.tokens_per_step = start, tokens_per_step
        self.done = self.reported = start
        self.seconds = 0.0

    def started(self, run: "Run") -> None:
        event = AttemptStarted(
            attempt=run.record.attempt,
            start=run.start,
            last_step=run.last_step,
            world_size=self.world.size,
            device=run.compute.device_name(),
            host=socket.gethostname(),
            parameters=sum(p.numel() for p in run.compute.model.parameters()),
            tokens_per_step=self.tokens_per_step,
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
        with clock.within("report"):
            busy, waited = tuple(figures.busy), tuple(figures.waited)
            self.observers.publish(StepComputed(self.done, figures.loss, figures.grad_norm, busy, waited))
            if self.observers.wants(self.done):
                self.observers.publish(self._done(figures))

    def _done(self, figures: Figures) -> StepDone:
        seconds, steps = self._trained() - self.seconds, figures.step - self.reported
        self.reported, self.seconds = figures.step, self.seconds + seconds
        return StepDone(
            step=figures.step,
            loss=figures.loss,
            lr=self.update.lr(figures.step - 1),
            grad_norm=figures.grad_norm,
            tokens_per_second=steps * self.tokens_per_step / seconds,
            step_seconds=seconds / steps,
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
