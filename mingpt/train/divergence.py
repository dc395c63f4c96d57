"""A run that does not learn any more: when it ends for that, and what the user is told. Alike in all processes."""

import shlex

from mingpt.config.schema import Config
from mingpt.console import say
from mingpt.errors import Mistake
from mingpt.redact import without_secrets
from mingpt.train.run import Run

SKIPPED_STEPS = 100  # in a row, after which a run has diverged; fp16 finds its first loss scale in fewer than 30


def check_divergence(run: Run, done: int) -> None:
    """Raise Mistake if too many steps in a row were skipped. Waits for the device once in SKIPPED_STEPS steps."""
    if done % SKIPPED_STEPS:
        return
    skipped = run.compute.update.skipped_in_a_row()
    if skipped >= SKIPPED_STEPS:
        there = run.checkpointer.keep()
        raise Mistake(
            f"nothing was learnt since step {done - skipped}: the gradients are not finite, so steps are skipped. "
            f"{_way_back(run.config, there)}"
        )


def leave_without_a_loss(run: Run, done: int, last: bool) -> None:
    """A run whose loss is no number has nothing to store. Raises Mistake at its end; after a stop it may go on."""
    there = run.checkpointer.keep()
    what = f"the loss of step {done} is not finite, so it was not stored"
    if last:
        raise Mistake(f"{what}. {_way_back(run.config, there)}")
    if run.world.speaks:
        say(f"{what}; the newest snapshot is that of step {there}")


def _way_back(config: Config, newest: int) -> str:
    """newest: the step of the newest durable snapshot; 0: there is none."""
    place = shlex.quote(str(without_secrets(config.run.dir)))
    if not newest:
        return "The run has diverged, and nothing was stored: the same command with a lower optimizer.lr starts afresh"
    return (
        f"The run has diverged: give a lower optimizer.lr, and go back to a step before the trouble, {newest} at the "
        f"latest (`python -m mingpt.snapshots rewind {place} --step N`), or start in another run.dir"
    )
