"""A run that does not learn any more: when it ends for that, and what the user is told. Alike in all processes."""

import shlex

from mingpt.compute.optimizer import Update
from mingpt.console import say
from mingpt.errors import UserError
from mingpt.redact import without_secrets
from mingpt.snapshot.checkpointer import Checkpointer
from mingpt.world.world import World

SKIPPED_STEPS = 100  # in a row, after which a run has diverged; fp16 finds its first loss scale in fewer than 30


class Divergence:
    def __init__(self, update: Update, checkpointer: Checkpointer, world: World, run_dir: str) -> None:
        self.update, self.checkpointer, self.world, self.run_dir = update, checkpointer, world, run_dir

    def check(self, done: int) -> None:
        """Raise UserError if too many steps in a row were skipped. Waits for the device once in SKIPPED_STEPS steps."""
        if done % SKIPPED_STEPS:
            return
        skipped = self.update.skipped_in_a_row()
        if skipped >= SKIPPED_STEPS:
            there = self.checkpointer.keep()
            raise UserError(
                f"nothing was learnt since step {done - skipped}: the gradients are not finite, so steps are skipped. "
                f"{self._way_back(there)}"
            )

    def leave_without_a_loss(self, done: int, last: bool) -> None:
        """A loss that is no number is not stored. Raises UserError at the run's end; after a stop it may go on."""
        there = self.checkpointer.keep()
        what = f"the loss of step {done} is not finite, so it was not stored"
        if last:
            raise UserError(f"{what}. {self._way_back(there)}")
        if self.world.is_main:
            say(f"{what}; the newest snapshot is that of step {there}")

    def _way_back(self, newest: int) -> str:
        """newest: the step of the newest durable snapshot; 0: there is none."""
        if not newest:
            return (
                "The run has diverged, and nothing was stored: the same command with a lower optimizer.lr starts afresh"
            )
        place = shlex.quote(str(without_secrets(self.run_dir)))
        return (
            f"The run has diverged: give a lower optimizer.lr, and go back to a step before the trouble, {newest} at "
            f"the latest (`mingpt snapshots rewind {place} --step N`), or start in another run.dir"
        )
