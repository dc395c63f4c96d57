"""The training loop. step.py does one step, assemble.py builds the Run.

Only the weights and `Update.state()` are state; everything else is a function of (config, state, step). So an attempt
that starts at any step with any number of processes computes what an undisturbed run would have computed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from mingpt.compute.stats import StepStats
from mingpt.errors import FINISHED, STOPPED
from mingpt.snapshot.checkpointer import Checkpointer, Content
from mingpt.snapshot.format import Metrics
from mingpt.train.context import StepContext
from mingpt.train.figures import DelayedRead, Figures
from mingpt.train.graphs import Graphs
from mingpt.train.step import train_step


@dataclass(frozen=True)
class Run:
    """One attempt. All processes call all of its functions.

    batches: the tensors of this process's microbatches, step by step. start: the number of steps done before.
    read: a step's figures; on CUDA, those of the step before. report: publishes them. check_skips: raises RolledBack or
    UserError after too many skipped steps. evaluate(done, last): evaluates if due; whether the validation loss is the
    lowest so far. metrics: what a snapshot stores beside the state; waits for the device. check_buffers: raises
    UserError if buffers of a user's model have changed. leave_without_a_loss(done, last): ends without a snapshot,
    which is a UserError at the run's end. ended(done, finished, digest): publishes the end. graphs: which microbatches
    are replayed.
    """

    context: StepContext
    batches: Iterator[Sequence[Tensor]]
    checkpointer: Checkpointer
    start: int
    last_step: int
    read: DelayedRead
    report: Callable[[Figures], None]
    check_skips: Callable[[Figures], None]
    evaluate: Callable[[int, bool], bool]
    metrics: Callable[[StepStats], Metrics]
    check_buffers: Callable[[], None]
    leave_without_a_loss: Callable[[int, bool], None]
    ended: Callable[[int, bool, str | None], None]
    ignore_signals: Callable[[], None]
    graphs: Graphs | None = None


def train(run: Run) -> int:
    """Train to train.max_steps, or until a process is asked to stop; returns the exit code.

    All processes decide alike, since each decides by figures and flags that the step's exchange has made equal.
    """
    context, checkpointer = run.context, run.checkpointer
    for step in range(run.start, run.last_step):
        run.read.begin(context.device)
        stats = train_step(context, step, run.batches, run.graphs)
        done, last = step + 1, step + 1 == run.last_step
        figures = run.read(done, stats, context.update.guard.skips)
        flags = figures.flags
        for known in (figures, run.read.last() if last or flags.stop else None):
            if known and known.losses:  # on CUDA the first call has none
                run.report(known)
                run.check_skips(known)
        best = run.evaluate(done, last)
        with context.hooks.phase("snapshot"):  # the watchdog gives such waits more time: nothing else waits in there
            due = last or flags.stop or checkpointer.is_due(done, flags) or best
        if due:
            run.check_buffers()
        if last or flags.stop:
            content = _content(run, stats)
            with context.hooks.phase("snapshot"):
                return _end(run, done, content, last, flags.stop)
        # A skipped step changed no weight: its snapshot would only push an older, good one out of snapshot.keep.
        if due and context.update.skipped_in_a_row() == 0:
            with context.hooks.phase("snapshot"):
                checkpointer.after_step(done, partial(_content, run, stats), flags, best)
    raise AssertionError("the last step returns")


def _content(run: Run, stats: StepStats) -> Content:
    """What a snapshot after this step holds. Waits for the device."""
    with run.context.hooks.phase("step"):  # what the device still does is the step, and not a wait for a snapshot
        return run.context.state(), run.metrics(stats)


def _end(run: Run, done: int, content: Content, last: bool, stopping: bool) -> int:
    """Store the attempt's last snapshot; returns FINISHED only if the run's last step is durable."""
    digest = None
    if content[1].loss is None:
        run.leave_without_a_loss(done, last)
    else:
        digest = run.checkpointer.last(done, content, stopping)
    finished = bool(run.context.world.broadcast(last and digest is not None))
    run.checkpointer.close()
    run.ended(done, finished, digest)
    # Before the barrier: after it, the first process to exit makes its agent send SIGTERM to the others.
    run.ignore_signals()
    run.context.world.barrier()
    return FINISHED if finished else STOPPED
