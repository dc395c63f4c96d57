"""Builds an attempt in named steps: model, context, restore, claim, collaborators, run. Then the loop runs.

Each step is a function or a constructor that a test can call with a world of one.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from mingpt.compute.numerics import pin
from mingpt.compute.stats import Flags
from mingpt.config.configfile import write_config
from mingpt.config.schema import Config
from mingpt.console import say
from mingpt.data.source import Source
from mingpt.errors import FINISHED
from mingpt.observe.stragglers import StepTimes
from mingpt.snapshot.attempts import RunRecord, make_run_dir
from mingpt.snapshot.checkpointer import Checkpointer
from mingpt.snapshot.home import Home
from mingpt.snapshot.restore import Restored
from mingpt.snapshot.tiers import Tiers
from mingpt.train import loop, setup
from mingpt.train.bad_steps import BadSteps
from mingpt.train.context import Hooks, StepContext
from mingpt.train.evaluation import Evaluation
from mingpt.train.factory import FixedBuffers
from mingpt.train.figures import DelayedRead
from mingpt.train.loop import Run
from mingpt.train.observers import open_observers
from mingpt.train.origin import Origin, another_running, claim_attempt, restore
from mingpt.train.reporter import Reporter
from mingpt.world import liveness
from mingpt.world.clock import awake_and_asleep
from mingpt.world.lifetime import Lifetime
from mingpt.world.world import World


def train(
    config: Config,
    source: Source,
    model: nn.Module,
    world: World,
    lifetime: Lifetime,
    notice_seconds: Callable[[], float] = lambda: 0.0,
    home: Home | None = None,
) -> int:
    """Train to train.max_steps, or until a process is asked to stop; returns the exit code.

    model: from factory.build, which need not be drawn. notice_seconds: see Checkpointer. home: see Tiers.
    """
    clock = lifetime.clock
    setup.check_targets(config, source)
    clock.enter("compiler")
    pin(config, world.device)  # imports torch's compiler, which takes seconds, if the config compiles
    clock.enter("model")
    setup.place_model(config, source, model, world)
    # Only now: a start that is refused for its data or model leaves no folder behind.
    world.run_on_main(lambda: make_run_dir(config.run.dir))
    # Before Tiers, which sets snapshots aside: they may be those of an attempt that is still training.
    world.run_on_main(lambda: another_running(config))
    # Weights, two moments, and the weights' mean.
    state_bytes = (3 + bool(config.optimizer.ema)) * sum(p.nbytes for p in model.parameters())
    tiers = Tiers(config, world, state_bytes, say, home)
    context = setup.context_of(config, source, model, world)
    clock.enter("restore")
    origin = restore(config, source, context, tiers, clock)
    complete = origin.loaded if origin.step >= config.train.max_steps else None
    if complete and tiers.is_durable(complete):
        tiers.forget_hot()
        if world.is_main:
            say(f"nothing to do: the run has reached step {origin.step}, and train.max_steps={config.train.max_steps}")
        return FINISHED
    record = claim_attempt(config, source, origin, tiers, world)
    if world.is_main:
        write_config(config, say)
    liveness.watch(world, lifetime, config.world.init_timeout_seconds)
    # Before `equalize`, by which rank 0's buffers replace those that differ: these are to be told from changed ones.
    buffers = FixedBuffers(model, config.model, world)
    with clock.within("rendezvous"):
        setup.equalize(context)
    clock.enter("observers")
    reporter = open_reporter(config, context, lifetime, origin, record)
    checkpointer = Checkpointer(config, tiers, record, reporter, notice_seconds)
    if complete:
        return store_the_end(complete, context, checkpointer, reporter, lifetime)
    run = run_of(config, source, context, origin, checkpointer, reporter, buffers)
    reporter.started(source)
    clock.enter("compile" if config.train.compile else "step")
    with liveness.watched(config, world, lifetime, reporter.report_hang):
        lifetime.observers.append(reporter.failed)
        return loop.train(run)


class RunHooks(Hooks):
    """Connects a run's steps with its clock, its snapshots and its stop signals."""

    def __init__(self, checkpointer: Checkpointer, lifetime: Lifetime, device: torch.device) -> None:
        self.checkpointer, self.lifetime = checkpointer, lifetime
        self.step_times = StepTimes(lifetime.clock.seconds, device)

    def begin(self) -> None:
        self.step_times.begin()

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self.lifetime.clock.within(name)

    def flags(self) -> Flags:
        return self.checkpointer.flags(self.lifetime.stop)

    def times(self) -> tuple[float, float]:
        return self.step_times()

    def before_update(self) -> None:
        self.checkpointer.before_update()


def open_reporter(
    config: Config, context: StepContext, lifetime: Lifetime, origin: Origin, record: RunRecord
) -> Reporter:
    observers = open_observers(config, record, context, lifetime)
    return Reporter(config, observers, context, lifetime, origin.step, record.attempt)


def run_of(
    config: Config,
    source: Source,
    context: StepContext,
    origin: Origin,
    checkpointer: Checkpointer,
    reporter: Reporter,
    buffers: FixedBuffers,
) -> Run:
    """Start the data loader, and give the loop what it calls."""
    lifetime, observers = reporter.lifetime, reporter.observers
    late = context.device.type == "cuda"  # the device computes while the host goes on
    return Run(
        context=context,
        hooks=RunHooks(checkpointer, lifetime, context.device),
        batches=setup.batches_of(config, source, context, origin.step),
        start=origin.step,
        last_step=config.train.max_steps,
        read=DelayedRead(context.update.guard.skips, late, awake_and_asleep, lifetime.clock.paused),
        reporter=reporter,
        bad_steps=BadSteps(config, context, checkpointer, observers),
        evaluation=Evaluation(context, config, source, observers, lifetime.clock, origin.best_val_loss),
        buffers=buffers,
        checkpointer=checkpointer,
        lifetime=lifetime,
        graphs=setup.graphs_of(config, context),
    )


def store_the_end(
    loaded: Restored, context: StepContext, checkpointer: Checkpointer, reporter: Reporter, lifetime: Lifetime
) -> int:
    """Make the run's last snapshot durable, which is only in a node's memory so far."""
    step = loaded.manifest.step
    digest = checkpointer.make_durable(loaded, context.state())
    if context.world.is_main:
        say(f"step {step} was in a node's memory only; now it is durable")
    reporter.end(step, True, digest)
    lifetime.ignore_signals()
    context.world.barrier()
    return FINISHED
