"""Ends a run that has diverged: its gradients or its loss are not finite. All processes decide alike."""

import shlex

from mingpt.compute.optimizer import Update
from mingpt.console import say
from mingpt.errors import UserError
from mingpt.redact import without_secrets
from mingpt.snapshot.checkpointer import Checkpointer
from mingpt.world.world import World

SKIPPED_STEPS = 100  # in a row: the run has diverged. (fp16 skips fewer than 30 until its loss scale fits.)


class Divergence:
    def __init__(self, update: Update, checkpointer: Checkpointer, world: World, run_dir: str) -> None:
        self.update, self.checkpointer, self.world, self.run_dir = update, checkpointer, world, run_dir

    def check(self, done: int) -> None:
        """Raise UserError if SKIPPED_STEPS steps in a row were skipped. Waits for the device once in as many steps."""
        if done % SKIPPED_STEPS:
            return
        skipped = self.update.skipped_in_a_row()
        if skipped >= SKIPPED_STEPS:
            newest = self.checkpointer.keep()
            raise UserError(
                f"nothing was learnt since step {done - skipped}: the gradients are not finite, so steps are skipped. "
                f"{self._advice(newest)}"
            )

    def leave_without_a_loss(self, done: int, last: bool) -> None:
        """End without a snapshot, since the loss is not finite. Raises UserError if this was the run's last step."""
        newest = self.checkpointer.keep()
        what = f"the loss of step {done} is not finite, so it was not stored"
        if last:
            raise UserError(f"{what}. {self._advice(newest)}")
        if self.world.is_main:
            say(f"{what}; the newest snapshot is that of step {newest}")

    def _advice(self, newest: int) -> str:
        """What the user can do. newest: the step of the newest durable snapshot; 0: there is none."""
        if not newest:
            return (
                "The run has diverged, and nothing was stored: the same command with a lower optimizer.lr starts afresh"
            )
        place = shlex.quote(str(without_secrets(self.run_dir)))
        return (
            f"The run has diverged: give a lower optimizer.lr, and go back to a step before the trouble, {newest} at "
            f"the latest (`mingpt snapshots rewind {place} --step N`), or start in another run.dir"
        )
