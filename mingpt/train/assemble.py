"""Builds an attempt in named steps: model, checkpointer, context, restore, claim, run. Then the loop runs.

Each step is a function that a test can call with a world of one.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from mingpt.compute.batches import BatchPlan, RankSampler
from mingpt.compute.mixture import MixedPlan
from mingpt.compute.numerics import autocast_for, pin
from mingpt.compute.own import OwnUpdate
from mingpt.compute.reduction import ExactReduction
from mingpt.config.configfile import write_config
from mingpt.config.schema import Config
from mingpt.config.section import Own
from mingpt.console import say
from mingpt.data.loader import load
from mingpt.data.source import Source, spread
from mingpt.errors import FINISHED, UserError
from mingpt.model.language import IGNORE
from mingpt.observe.speed import gpu_part
from mingpt.observe.stragglers import StepTimes
from mingpt.snapshot.attempts import make_run_dir
from mingpt.snapshot.checkpointer import Checkpointer
from mingpt.snapshot.home import Home
from mingpt.snapshot.restore import Restored
from mingpt.train import loop
from mingpt.train.bad_steps import BadSteps
from mingpt.train.context import ALONE, Hooks, StepContext, make_context
from mingpt.train.evaluation import Evaluation, evaluated_part
from mingpt.train.factory import buffer_check, give_memory, prepare, try_out, why_no_graph
from mingpt.train.figures import DelayedRead
from mingpt.train.graphs import RECORDERS, Graphs
from mingpt.train.loop import Run
from mingpt.train.origin import another_running, claim_attempt, restore
from mingpt.train.reporter import Reporter, begin_snapshots, open_observers
from mingpt.world import liveness, peers
from mingpt.world.clock import awake_and_asleep
from mingpt.world.lifetime import Lifetime
from mingpt.world.warmup import warm_up
from mingpt.world.world import World

MOST_READ = 1000  # samples, to find one with a target


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

    model: from factory.build, which need not be drawn. notice_seconds, home: see Checkpointer.
    """
    clock = lifetime.clock
    if isinstance(config.data, Own):  # in the package's own kinds of data each sample has targets
        check_targets(config, source)
    clock.enter("compiler")
    pin(config, world.device)  # imports torch's compiler, which takes seconds, if the config compiles
    clock.enter("model")
    place_model(config, source, model, world)
    world.run_on_main(lambda: make_run_dir(config.run.dir))  # a start that is refused for its data or model leaves none
    world.run_on_main(lambda: another_running(config))  # before its snapshots are touched
    # Weights, two moments, and the weights' mean.
    state_bytes = (3 + bool(config.optimizer.ema)) * sum(p.nbytes for p in model.parameters())
    checkpointer = Checkpointer(config, world, state_bytes, say, notice_seconds, home)
    context = context_of(config, source, model, world, hooks_of(checkpointer, lifetime, world.device))
    clock.enter("restore")
    origin = restore(config, source, context, checkpointer)
    complete = origin.loaded if origin.step >= config.train.max_steps else None
    if complete and checkpointer.is_durable(complete):
        checkpointer.forget_hot()
        if world.is_main:
            say(f"nothing to do: the run has reached step {origin.step}, and train.max_steps={config.train.max_steps}")
        return FINISHED
    record = claim_attempt(config, source, origin, checkpointer, world)
    if world.is_main:
        write_config(config, say)
    peers.watch(world, lifetime, config.world.init_timeout_seconds)
    check_buffers = buffer_check(model, config.model, world)  # before rank 0's replace those that differ
    with clock.within("rendezvous"):
        equalize(context)
    clock.enter("observers")
    observers = open_observers(config, record, context, lifetime)
    reporter = Reporter(config, observers, context, lifetime, origin.step, record.attempt)
    begin_snapshots(checkpointer, record, observers)
    if complete:
        return store_the_end(complete, context, checkpointer, reporter, lifetime)
    evaluation = Evaluation(context, config, source, observers.publish, best_val_loss=origin.best_val_loss)
    bad_steps = BadSteps(config, context, checkpointer, observers)
    run = run_of(config, source, context, checkpointer, origin.step, evaluation, bad_steps, reporter, check_buffers)
    reporter.started(source)
    clock.enter("compile" if config.train.compile else "step")
    with liveness.watched(config, world, lifetime, reporter.report_hang):
        lifetime.observers.append(reporter.failed)
        return loop.train(run)


def place_model(config: Config, source: Source, model: nn.Module, world: World) -> None:
    """Move the model to this process's device, ready to compute. Raises UserError if a user's can't be trained.

    An outline has memory then, and no weights yet.
    """
    pin(config, world.device)
    if next(model.parameters()).is_meta:
        give_memory(model, world.device)
    model.to(world.device)
    if isinstance(config.model, Own):
        first = source.train[list(range(min(config.batch.micro_size, len(source.train))))]
        with autocast_for(config, world.device):
            try_out(model, config.model, [x.to(world.device) for x in first])
    prepare(config, model)


def check_targets(config: Config, source: Source) -> None:
    """Raise UserError if no target counts in what is trained on or evaluated on, as far as MOST_READ samples tell."""
    splits = {"training": (source.train[[i]] for i in spread(len(source.train), MOST_READ))}
    if len(source.validation):
        part = evaluated_part(source.validation, config.train.eval_batches)
        splits["validation"] = (part[i] for i in range(len(part)))
    for name, microbatches in splits.items():  # of most data the first sample tells
        if not any(len(found) < 2 or bool((found[1] != IGNORE).any()) for found in microbatches):
            raise UserError(
                f"data.kind={config.data.kind}: none of its {name} targets counts, all are {IGNORE}: nothing can be "
                f"learnt or measured; mark the targets that count"
            )


def hooks_of(checkpointer: Checkpointer, lifetime: Lifetime, device: torch.device) -> Hooks:
    """Connect a run's steps with its clock and its snapshots."""
    times = StepTimes(lifetime.clock.seconds, device)
    return Hooks(
        flags=lambda: checkpointer.flags(lifetime.stop),
        before_update=checkpointer.before_update,
        phase=lifetime.clock.within,
        begin=times.begin,
        times=times,
    )


def context_of(config: Config, source: Source, model: nn.Module, world: World, hooks: Hooks = ALONE) -> StepContext:
    """Make what computes the steps of this config. Call `place_model` first."""
    batch = config.batch  # only with batch.per_process_size does its size depend on the world
    sizes = len(source.train), config.seed, config.global_size(world.size), batch.micro_size, tuple(batch.double_at)
    plan = MixedPlan(*sizes, mixture=source.mixture) if source.mixture else BatchPlan(*sizes)
    own = partial(OwnUpdate, config.optimizer) if isinstance(config.optimizer, Own) else None
    return make_context(config, model, plan, world, autocast_for(config, world.device), hooks, own)


def equalize(context: StepContext) -> None:
    """Take rank 0's weights and tables: each process has computed its own, which may differ between machines."""
    model, world = context.model, context.world
    world.take_from_main([*model.parameters(), *model.buffers()])
    if world.size > 1 and world.comm_device.type == "cuda":
        update = context.update
        warm_up(world, max(len(bucket.weights) for bucket in update.buckets), bool(update.of_muon or update.own))


def graphs_of(config: Config, context: StepContext) -> Graphs | None:
    """What decides which microbatches are replayed; None: none is."""
    wanted, reduction, device = config.train.cuda_graphs, context.reduction, context.device.type
    if wanted is False or (wanted == "auto" and device not in RECORDERS):
        return None
    reason = f"this process computes on {device}"
    if device in RECORDERS:
        reason = why_no_graph(config, context.world.size) or ""
    if not reason and isinstance(reduction, ExactReduction):
        # Processes that share a GPU ask for its free memory at the same time.
        return Graphs(context, reduction, gpu_part() if wanted == "auto" else None, say)
    if context.world.is_main:
        say(f"train.cuda_graphs: microbatches are computed without a graph: {reason}")
    return None


def run_of(
    config: Config,
    source: Source,
    context: StepContext,
    checkpointer: Checkpointer,
    start: int,
    evaluation: Evaluation,
    bad_steps: BadSteps,
    reporter: Reporter,
    check_buffers: Callable[[], None] = lambda: None,
) -> Run:
    """Start the data loader, and give the loop what it calls. start: steps done before."""
    work = RankSampler(context.plan, context.microbatches, start, config.train.max_steps)
    return Run(
        context=context,
        batches=load(source.train, work, config.data.workers, config.world.timeout_seconds, context.device),
        checkpointer=checkpointer,
        start=start,
        last_step=config.train.max_steps,
        read=DelayedRead(start, context.device.type == "cuda", awake_and_asleep, reporter.lifetime.clock.paused),
        report=reporter.step,
        check_skips=bad_steps.check,
        evaluate=evaluation.after_step,
        metrics=evaluation.metrics,
        check_buffers=check_buffers,
        leave_without_a_loss=bad_steps.leave_without_a_loss,
        ended=reporter.end,
        ignore_signals=reporter.lifetime.ignore_signals,
        graphs=graphs_of(config, context),
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
