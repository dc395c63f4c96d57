"""The training loop. step.py does one step, session.py builds the Run.

Only the weights and `Update.state()` are state; everything else is a function of (config, step). So an attempt that
starts at any step with any number of processes computes what an undisturbed run would have computed.
"""

from functools import partial
from typing import TYPE_CHECKING

from mingpt.errors import FINISHED, STOPPED
from mingpt.train.step import train_step

if TYPE_CHECKING:
    from mingpt.snapshot.checkpointer import Content
    from mingpt.train.run import Run


def train(run: "Run") -> int:
    """Train to train.max_steps, or until a process is asked to stop; returns the exit code.

    All processes decide alike, since each decides by figures and flags that the step's exchange has made equal.
    """
    for step in range(run.start, run.last_step):
        stats = train_step(run, step)
        done, last = step + 1, step + 1 == run.last_step
        figures = run.read(done, stats, run.compute.update.guard.skips)
        stop, *flags = figures.flags
        run.take_note(figures, ending=last or stop > 0)
        best = run.evaluation.after_step(done, last)
        with run.lifetime.clock.within("snapshot"):
            due = last or stop > 0 or run.checkpointer.is_due(done, flags) or best
            if due:
                run.check_buffers()
            if last or stop > 0:
                return _end(run, done, run.content(stats), last, stopping=stop > 0)
            # After a skipped step the weights are not new. Retention would delete older, good snapshots for such ones.
            if due and run.compute.update.skipped_in_a_row() == 0:
                run.checkpointer.after_step(done, partial(run.content, stats), flags, best)
    raise AssertionError("the last step returns")


def _end(run: "Run", done: int, content: "Content", last: bool, stopping: bool) -> int:
    """Store the attempt's last snapshot; returns FINISHED only if the run's last step is durable."""
    digest = None
    if content[1].loss is None:
        run.bad_steps.leave_without_a_loss(done, last)
    else:
        digest = run.checkpointer.last(done, content, stopping)
    finished = bool(run.world.broadcast(last and digest is not None))
    run.checkpointer.close()
    run.reporter.end(done, finished, digest)
    # Before the barrier: after it, the first process to exit makes its agent send SIGTERM to the others.
    run.lifetime.settle()
    run.world.barrier()
    return FINISHED if finished else STOPPED
