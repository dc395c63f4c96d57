"""An attempt's second half, after the claim: who watches it, who stores its snapshots, who reports; then the loop."""

from collections.abc import Callable

from mingpt.cli.console import say
from mingpt.errors import FINISHED
from mingpt.tiers.checkpointer import Checkpointer
from mingpt.train import loop, setup
from mingpt.train.bad_steps import BadSteps
from mingpt.train.claiming import Claimed
from mingpt.train.evaluation import Evaluation
from mingpt.train.figures import DelayedRead
from mingpt.train.hooks import RunHooks
from mingpt.train.observers import open_observers
from mingpt.train.own_model import FixedBuffers
from mingpt.train.reporter import Reporter
from mingpt.world import liveness, peers


def run(attempt: Claimed, notice_seconds: Callable[[], float] = lambda: 0.0) -> int:
    """Run the loop, or only store the last step if a node's memory has it already. Returns the exit code."""
    config, context, lifetime = attempt.config, attempt.context, attempt.lifetime
    world, clock = context.world, lifetime.clock
    peers.watch(world, lifetime, config.world.init_timeout_seconds)
    # Before `equalize`, by which rank 0's buffers replace those that differ: these are to be told from changed ones.
    buffers = FixedBuffers(context.model, config.model, world)
    with clock.within("rendezvous"):
        setup.equalize(context)
    clock.enter("observers")
    observers = open_observers(config, attempt.record, context, lifetime)
    reporter = Reporter(config, observers, context, lifetime, attempt.origin.step, attempt.record.attempt)
    checkpointer = Checkpointer(config, attempt.tiers, attempt.record, reporter, notice_seconds)
    if attempt.origin.step >= config.train.max_steps:
        return store_the_end(attempt, checkpointer, reporter)
    made = run_of(attempt, checkpointer, reporter, buffers)
    reporter.started(attempt.source)
    clock.enter("compile" if config.train.compile else "step")
    with liveness.watched(config, world, lifetime, reporter.report_hang):
        lifetime.observers.append(reporter.failed)
        return loop.train(made)


def run_of(attempt: Claimed, checkpointer: Checkpointer, reporter: Reporter, buffers: FixedBuffers) -> loop.Run:
    """Start the data loader, and give the loop what it calls."""
    config, source, context, lifetime = attempt.config, attempt.source, attempt.context, attempt.lifetime
    observers, start = reporter.observers, attempt.origin.step
    # On CUDA the device computes while the host goes on, so a step's figures are read during the next one.
    late = context.device.type == "cuda"
    return loop.Run(
        context=context,
        hooks=RunHooks(checkpointer, lifetime, context.device),
        batches=setup.batches_of(config, source, context, start),
        start=start,
        last_step=config.train.max_steps,
        read=DelayedRead(context.update.guard.skips, late, paused=lifetime.clock.paused),
        reporter=reporter,
        bad_steps=BadSteps(config, context, checkpointer, observers),
        evaluation=Evaluation(context, config, source, observers, lifetime.clock, attempt.origin.best_val_loss),
        buffers=buffers,
        checkpointer=checkpointer,
        lifetime=lifetime,
        graphs=setup.graphs_of(config, context),
    )


def store_the_end(attempt: Claimed, checkpointer: Checkpointer, reporter: Reporter) -> int:
    """Make the run's last snapshot durable, which is only in a node's memory so far."""
    loaded, world = attempt.origin.loaded, attempt.context.world
    assert loaded
    step = loaded.manifest.step
    digest = checkpointer.make_durable(loaded, attempt.context.state())
    if world.is_main:
        say(f"step {step} was in a node's memory only; now it is durable")
    reporter.end(step, True, digest)
    # As at the loop's end: after the barrier, the first process to exit makes its agent send SIGTERM to the others.
    attempt.lifetime.ignore_signals()
    world.barrier()
    return FINISHED
