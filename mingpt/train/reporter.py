"""Publishes a StepDone event for each step that an observer wants, and AttemptEnded at the end."""

from mingpt.compute.optimizer import Update
from mingpt.console import say
from mingpt.observe.events import AttemptEnded, Observers, StepDone
from mingpt.train.stats import StepStats
from mingpt.world.lifetime import Lifetime, Phase
from mingpt.world.world import World

STARTING = ("import", "data", "rendezvous", "load")  # the clock's phases before the first step


class Reporter:
    """Remembers the last reported step and the training time up to it, from which StepDone's averages follow."""

    def __init__(
        self, observers: Observers, world: World, lifetime: Lifetime, update: Update, start: int, tokens_per_step: int
    ) -> None:
        self.observers, self.world, self.lifetime, self.update = observers, world, lifetime, update
        self.start, self.reported, self.seconds, self.tokens_per_step = start, start, 0.0, tokens_per_step

    def step(self, done: int, stats: StepStats) -> None:
        """Called after each step. Waits for the device only if an observer wants this step."""
        clock = self.lifetime.clock
        if done == self.start + 1:
            self.lifetime.phase = Phase.TRAINING
            if self.world.is_main:
                parts = {name: clock.seconds(name) for name in STARTING} | {"first step": clock.seconds("step")}
                say("start: " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in parts.items()))
        if not self.observers.wants(done):
            return
        loss, grad_norm = stats.mean_loss(), stats.norm()  # waits for the device
        seconds, steps = clock.seconds("step") - self.seconds, done - self.reported
        self.reported, self.seconds = done, self.seconds + seconds
        event = StepDone(
            step=done,
            loss=loss,
            lr=self.update.lr(done - 1),
            grad_norm=grad_norm,
            tokens_per_second=steps * self.tokens_per_step / seconds,
            step_seconds=seconds / steps,
            world_size=self.world.size,
        )
        with clock.within("report"):
            self.observers.publish(event)

    def end(self, done: int, finished: bool, digest: str | None) -> None:
        self.observers.publish(AttemptEnded(done, finished, digest))
