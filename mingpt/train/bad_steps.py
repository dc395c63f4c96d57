"""Steps that were skipped: what is said of them, and when a run goes back or ends for them. Alike in all processes."""

import math
import shlex
from typing import NoReturn

from mingpt.cli.console import say
from mingpt.compute.guard import Range
from mingpt.config.schema import Config
from mingpt.errors import RolledBack, UserError
from mingpt.observe.events import Observers, StepSkipped
from mingpt.snapshot.attempts import records, without_undone
from mingpt.tiers.checkpointer import Checkpointer
from mingpt.tiers.rewinding import rewind
from mingpt.train.context import StepContext
from mingpt.train.figures import Figures
from mingpt.world.world import World


def rolled_back(config: Config, since: int, world: World) -> list[Range]:
    """The batches that were dropped by a rollback after attempt `since`.

    Called by all processes; rank 0 reads the rollbacks.
    """

    def find() -> list[Range]:
        claims = without_undone(records(config.run.dir))
        return [r.dropped for n, r in sorted(claims.items()) if n > since and r.dropped]

    return [(first, end) for first, end in world.run_on_main(find)]  # lists, after their way through a message


class BadSteps:
    def __init__(self, config: Config, context: StepContext, checkpointer: Checkpointer, observers: Observers) -> None:
        self.config, self.context, self.checkpointer = config, context, checkpointer
        self.observers, self.world = observers, context.world

    def check(self, figures: Figures) -> None:
        """Called with each step's figures, on CUDA one step late.

        Raises RolledBack or UserError in all processes after health.max_skips skipped steps in a row.
        """
        if not figures.skips:
            return
        if self.world.is_main:
            self.observers.publish(self._skipped(figures))
        # However late this is read: the device has refused every step since, so the weights are those of the last good.
        if figures.skips >= self.config.health.max_skips:
            self._go_back(figures.step - figures.skips)

    def _skipped(self, figures: Figures) -> StepSkipped:
        losses, norm = figures.losses, figures.grad_norm
        ids = self.context.plan.by_microbatch(figures.step - 1)
        bad = [m for m, loss in enumerate(losses) if not math.isfinite(loss)]
        spike = not bad and math.isfinite(norm)
        if spike:
            # All are finite, so the mean was judged: the highest one has done most to it.
            bad = [losses.index(max(losses))]
        samples = list[int]()
        for microbatch in bad:
            samples += ids[microbatch]
        return StepSkipped(figures.step, figures.loss, norm, figures.skips, spike, tuple(bad), tuple(samples))

    def _go_back(self, good: int) -> NoReturn:
        """good: the last step that was not skipped; its state is still that of the weights."""
        newest, health = self.checkpointer.keep(), self.config.health
        # Positions in the order of all batches, not step numbers: those that were dropped before take up no step.
        first = self.context.plan.batch(good)
        last = self.context.plan.batch(good + health.max_skips - 1)

        def look() -> tuple[int, int]:
            """The snapshot to go back to (0: there is none), and how often the run has gone back."""
            older = [s for s in self.checkpointer.store.steps() if s <= good]
            rollbacks = [r for r in records(self.config.run.dir).values() if r.dropped is not None]
            return max(older, default=0), len(rollbacks)

        step, claimed = self.world.run_on_main(look)
        # A fork has the dropped batches of the run that it comes from in its state, and no claims of it.
        used = max(claimed, len(self.context.plan.dropped))
        if not step or used >= health.max_rollbacks:
            tried = f" The run went back {used} time{'s' * (used > 1)}, and it was no help." if used else ""
            raise UserError(
                f"nothing was learnt since step {good}: {health.max_skips} steps in a row were skipped.{tried} "
                f"{self._advice(newest)}"
            )

        def back() -> None:
            run_dir, store = self.config.run.dir, self.checkpointer.store
            rewind(run_dir, store, step, self.config.snapshot.hot_dir, say, dropped=(first, last + 1))

        self.world.run_on_main(back)
        # The processes end, and the next attempt restores: there is no second way to load a state inside an attempt.
        raise RolledBack(
            f"{health.max_skips} steps in a row were skipped after step {good}: the run goes back to step {step}, and "
            f"batches {first} to {last} are shown no more (rollback {used + 1} of {health.max_rollbacks}): start again"
        )

    def end_with_a_loss_that_is_not_finite(self, done: int, last: bool) -> None:
        """A loss that is no number is not stored. Raises UserError at the run's end; after a stop it may go on."""
        newest = self.checkpointer.keep()
        what = f"the loss of step {done} is not finite, so it was not stored"
        if last:
            raise UserError(f"{what}. {self._advice(newest)}")
        if self.world.is_main:
            say(f"{what}; the newest snapshot is that of step {newest}")

    def _advice(self, newest: int) -> str:
        """Tell the user what to do. newest: the step of the newest durable snapshot; 0: there is none."""
        if not newest:
            return (
                "The run has diverged, and nothing was stored: the same command with a lower optimizer.lr starts afresh"
            )
        place = shlex.quote(self.config.run.dir)
        return (
            f"The run has diverged: give a lower optimizer.lr with resume.changed=true, and go back to a step before "
            f"the trouble, {newest} at the latest (`mingpt snapshots rewind {place} --step N`), or start in another "
            f"run.dir"
        )
