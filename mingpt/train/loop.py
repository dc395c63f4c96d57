"""The training loop. step.py does one step, `running.py: run_of` makes the Run.

Only the weights and `Update.state()` are state; everything else is a function of (config, state, step). So with
reduce=exact an attempt that starts at any step with any number of processes computes what an undisturbed run would have
computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from mingpt.compute.stats import Flags, StepStats
from mingpt.errors import FINISHED, STOPPED
from mingpt.tiers.checkpointer import Checkpointer, Content
from mingpt.train.bad_steps import BadSteps
from mingpt.train.context import Hooks, StepContext
from mingpt.train.evaluation import Evaluation
from mingpt.train.figures import DelayedRead
from mingpt.train.graphs import Graphs
from mingpt.train.own_model import FixedBuffers
from mingpt.train.reporter import Reporter
from mingpt.train.step import train_step
from mingpt.world.lifetime import Lifetime, Phase


@dataclass(frozen=True)
class Run:
    """One attempt: what the loop calls. All processes call all of it, in the same order."""

    # What a step computes with: the model, its update, the world.
    context: StepContext
    # What happens inside a step besides computing.
    hooks: Hooks
    # The tensors of this process's microbatches, step by step.
    batches: Iterator[Sequence[Tensor]]
    # Steps done before this attempt, and train.max_steps.
    start: int
    last_step: int
    # A step's figures as numbers; on CUDA one step late.
    read: DelayedRead
    # Publishes each step's figures, and the attempt's end.
    reporter: Reporter
    # Ends the attempt after too many skipped steps in a row, or with a loss that is not finite.
    bad_steps: BadSteps
    # Evaluates if due. The best validation loss is no state: it follows from the evaluations.
    evaluation: Evaluation
    # Those of a user's model: what is stored must not have others.
    buffers: FixedBuffers
    checkpointer: Checkpointer
    # How far this process has come, whether it is asked to stop, and its clock.
    lifetime: Lifetime
    # Which microbatches are replayed as a CUDA graph; None: none is.
    graphs: Graphs | None = None


def train(run: Run) -> int:
    """Train to train.max_steps, or until a process is asked to stop.

    Returns the exit code: FINISHED (0) or STOPPED (75). All processes decide alike, since each decides by figures and
    flags that the step's exchange has made equal.
    """
    context, clock = run.context, run.lifetime.clock
    for step in range(run.start, run.last_step):
        done = step + 1
        last = done == run.last_step
        run.read.begin()
        stats = train_step(context, step, run.batches, run.hooks, run.graphs)
        ready = run.read.ready(done, stats, drain=last)
        flags = ready[-1].flags if ready else Flags()  # on CUDA, after the first step nothing is known yet
        for figures in ready:
            if figures.step == run.start + 1:
                # From now on, running out of memory may be temporary (exit code 70, retried): the first step has shown
                # that the model fits. Before, it never will (64).
                run.lifetime.phase = Phase.TRAINING
                clock.enter("step")  # the first one is counted as "compile" if the model is compiled
            run.reporter.step(figures)
            run.bad_steps.check(figures)
        # Before the snapshot: the validation loss is committed with the weights that it is of.
        best = run.evaluation.after_step(done, last)
        if last or flags.stop:
            # "Asked to stop" came with the exchange of a step, so all processes leave the loop after the same one.
            run.buffers.check()
            content = _content(run, stats)
            with clock.within("snapshot"):
                return _end(run, done, content, last, flags.stop)
        # The watchdog gives what waits for a snapshot more time, so nothing else waits in this phase.
        with clock.within("snapshot"):
            due = run.checkpointer.is_due(done, flags, best)
        if due:
            run.buffers.check()
            # A skipped step changed no weight: its snapshot would only push an older, good one out of snapshot.keep.
            # Asking waits for the device, so it is asked only now.
            if context.update.skipped_in_a_row() == 0:
                with clock.within("snapshot"):
                    run.checkpointer.after_step(done, partial(_content, run, stats), flags, best)
    raise AssertionError("the last step returns")


def _content(run: Run, stats: StepStats) -> Content:
    """What a snapshot after this step holds. Waits for the device."""
    # What the device still does is the step, and no wait for a snapshot.
    with run.lifetime.clock.within("step"):
        return run.context.state(), run.evaluation.metrics(stats)


def _end(run: Run, done: int, content: Content, last: bool, stopping: bool) -> int:
    """Store the attempt's last snapshot; returns FINISHED only if the run's last step is durable."""
    digest = None
    _, metrics = content
    if metrics.loss is None:
        run.bad_steps.end_with_a_loss_that_is_not_finite(done, last)
    else:
        digest = run.checkpointer.last(done, content, stopping)
    # One answer for all: who started the run (a recipe or a user, not the agent) starts it again after STOPPED, and
    # never after FINISHED.
    finished = bool(run.context.world.broadcast(last and digest is not None))
    run.checkpointer.close()
    run.reporter.end(done, finished, digest)
    # Before the barrier: after it, the first process to exit makes its agent send SIGTERM to the others.
    run.lifetime.ignore_signals()
    run.context.world.barrier()
    return FINISHED if finished else STOPPED
