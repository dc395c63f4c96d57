"""Builds what an attempt needs, in this order: compute, checkpointer, restore, record, run. Then runs the loop."""

import time
from collections.abc import Callable
from datetime import datetime, timezone

from torch import nn

from mingpt.compute.batches import BatchPlan, RankSampler
from mingpt.compute.buckets import make_buckets
from mingpt.compute.fast import FastReduction
from mingpt.compute.groups import muon_names, roles, rules
from mingpt.compute.mixture import MixedPlan
from mingpt.compute.narrow import narrow_names, pack
from mingpt.compute.numerics import autocast_for, pin, slow_precision
from mingpt.compute.optimizer import Update
from mingpt.compute.reduction import ExactReduction, Reduction
from mingpt.config.configfile import write_config
from mingpt.config.schema import Config
from mingpt.config.section import Own
from mingpt.console import counted, say
from mingpt.data.loader import load
from mingpt.data.source import Source
from mingpt.errors import FINISHED, UserError
from mingpt.observe.events import HotCommitted, SnapshotCommitted, SnapshotLost
from mingpt.observe.ledger import accounts, duration
from mingpt.observe.notify import notify
from mingpt.redact import printable, without_secrets
from mingpt.snapshot.attempts import TRAIN, Attempt, RunRecord, is_visible, make_run_dir, records, runs_here
from mingpt.snapshot.checkpointer import FLAGS, Checkpointer
from mingpt.snapshot.restore import Restored
from mingpt.train import loop, own_model
from mingpt.train.audit import Audit
from mingpt.train.bad_steps import BadSteps
from mingpt.train.factory import prepare, trainable
from mingpt.train.observers import open_observers
from mingpt.train.origin import Origin, restore
from mingpt.train.proportions import proportions
from mingpt.train.reporter import Reporter
from mingpt.train.run import Compute, Evaluation, Run
from mingpt.train.stats import DelayedRead, StatsExchange
from mingpt.train.times import StepTimes
from mingpt.world import liveness
from mingpt.world.lifetime import Lifetime
from mingpt.world.warmup import warm_up
from mingpt.world.world import World

DYING_SECONDS = 5  # a process that was killed with its launcher frees its memory first
SEEN_SECONDS = 60  # an attempt on another machine that has noted something since then may be running


def train(config: Config, source: Source, model: nn.Module, world: World, lifetime: Lifetime) -> int:
    """Train to train.max_steps, or until a process is asked to stop; returns the exit code.

    model: from factory.build, with the same initial weights in every process.
    """
    world.run_on_main(lambda: make_run_dir(config.run.dir))
    world.run_on_main(lambda: another_running(config))  # before its snapshots are touched
    compute = build_compute(config, source, model, world)
    state_bytes = 3 * sum(p.nbytes for p in model.parameters())  # weights and two moments
    checkpointer = Checkpointer(config, world, state_bytes, say)
    checkpointer.notice_seconds = lifetime.grace_seconds
    origin = restore(config, source, compute, checkpointer, world)
    complete = origin.loaded if origin.step >= config.train.max_steps else None
    if complete and checkpointer.is_durable(complete):
        checkpointer.forget_hot()
        if world.is_main:
            say(f"nothing to do: the run has reached step {origin.step}, and train.max_steps={config.train.max_steps}")
        return FINISHED
    record = claim_attempt(config, source, origin, checkpointer, world)
    if world.is_main:
        write_config(config, say)
    liveness.watch(world, lifetime, config.world.init_timeout_seconds)
    run = build_run(config, source, compute, checkpointer, record, origin, world, lifetime)
    observers = run.observers  # the lambda must not capture `run`: the writer's thread would keep it alive at the end
    checkpointer.begin(
        record,
        committed=lambda *what: observers.publish(SnapshotCommitted(*what)),
        committed_hot=lambda step: observers.publish(HotCommitted(step)),
        lost=lambda *what: observers.publish(SnapshotLost(*what)),
    )
    if complete:
        return store_the_end(run, complete)
    announce(run)
    lifetime.clock.enter("compile" if config.train.compile else "step")
    with liveness.watched(config, world, lifetime, teller(config, run.reporter, record)):
        lifetime.failed = run.reporter.failed
        return loop.train(run)


def another_running(config: Config) -> str:
    """What to say of an attempt of this run that seems to be training. Raises UserError if it is, on this machine."""
    claims = records(config.run.dir)
    newest = claims.get(max(claims, default=0))
    if newest is None or newest.by != TRAIN:
        return ""
    account = next((a for a in accounts(config.run.dir) if a.attempt == newest.number), None)
    silent, here = time.time() - account.until if account else 0.0, runs_here(newest)
    deadline = time.monotonic() + (0 if config.resume.take_over or (account and account.end) else DYING_SECONDS)
    while here and time.monotonic() < deadline:
        time.sleep(0.1)
        here = runs_here(newest)
    known_elsewhere = here is None and account is not None and silent < SEEN_SECONDS
    if (account and account.end) or not (here or known_elsewhere):
        return ""
    process = newest.process or {}
    seen = f", last seen {duration(max(0.0, silent))} ago" if account else ""
    host = process.get("host") or (account and account.host)
    who = printable(f"attempt {newest.number} ({host}, pid {process.get('pid')}{seen})")
    if here and not config.resume.take_over:
        raise UserError(
            f"run.dir={without_secrets(config.run.dir)}: {who} is training this run on this machine: stop it, give "
            f"this run another run.name, or take over with resume.take_over=true"
        )
    return f"{who} seems to be running: this attempt takes over"


def teller(config: Config, reporter: Reporter, record: RunRecord) -> Callable[[BaseException], None]:
    """What tells of a hang: rank 0's observers, and an alarm in another process, which tells if rank 0 is silent."""
    if reporter.world.is_main:
        return reporter.failed
    url, name, attempt = config.health.notify, config.run.name, record.attempt
    return lambda error: notify(url, "hang", str(error), name, attempt, reporter.done)


def build_compute(config: Config, source: Source, model: nn.Module, world: World) -> Compute:
    """Model, optimizer and batch plan on this process's device. Raises UserError if a user's model can't be trained."""
    pin(config, world.device)
    model.to(world.device)
    sizes = len(source.train), config.seed, config.global_size(world.size), config.batch.micro_size
    plan = MixedPlan(*sizes, mixture=source.mixture) if source.mixture else BatchPlan(*sizes)
    named, role_of = trainable(model), roles(model)
    buckets = make_buckets(named, muon_names(config.optimizer.name, role_of), world, config.shards)
    autocast = autocast_for(config, world.device)
    # Nobody knows what a user's model reads in float32, even if its class derives from one of ours.
    narrow = set() if isinstance(config.model, Own) else narrow_names(model, autocast)
    update = Update(
        buckets,
        rules(named, config.optimizer, role_of),
        config.optimizer,
        config.schedule,
        world,
        global_size=plan.global_size,
        tokens_per_microbatch=plan.micro_size * config.model.block_size,
        fp16=config.precision == "fp16",
        health=config.health,
        packings=pack(buckets, narrow, autocast),
    )
    if isinstance(config.model, Own):
        first = source.train[list(range(min(plan.micro_size, len(source.train))))]
        with autocast:
            own_model.try_out(model, config.model, [x.to(world.device) for x in first])
    return Compute(model, update, plan, autocast, world.device)


def claim_attempt(
    config: Config, source: Source, origin: Origin, checkpointer: Checkpointer, world: World
) -> RunRecord:
    """Take this attempt's number in run.dir. Raises UserError unless every process sees what rank 0 has written."""
    claims = list[Attempt]()  # stays empty in other processes than rank 0

    def claim() -> int:
        parent = (origin.loaded.manifest.digest, origin.loaded.manifest.attempt) if origin.loaded else (None, 0)
        if another := another_running(config):  # it may have started meanwhile
            say(another)
        claims.append(Attempt.claim(config.run.dir, origin.step, *parent))
        return claims[0].number

    attempt = world.run_on_main(claim)
    blind = [rank for rank, sees in enumerate(world.gather(is_visible(config.run.dir, attempt))) if not sees]
    if blind:  # checked now: the first snapshot would fail, perhaps hours later
        raise UserError(
            f"run.dir={without_secrets(config.run.dir)} is not shared by all: process {blind[0]} does not see what "
            f"process 0 has written there: take a folder that all nodes share, or a bucket"
        )
    this_attempt = {
        "attempt": attempt,
        "from_step": origin.step,
        "world_size": world.size,
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "numerics": origin.numerics,
        "conditional_puts": world.run_on_main(lambda: checkpointer.store.conditional_puts),
    }
    if origin.changes:
        this_attempt["changes"] = origin.changes
    provenance = {
        "run": config.run.name,
        "vocabulary": source.vocabulary.to_json(),
        "config": without_secrets(config.model_dump()),
        "fingerprint": origin.numerics,
        "history": [*origin.history, this_attempt],
    }
    return RunRecord(attempt, claims[0] if claims else None, provenance)


def make_reduction(config: Config, compute: Compute, world: World) -> Reduction:
    """What sums the gradients of all processes."""
    if config.reduce == "fast":
        return FastReduction(compute.update.buckets, world)
    return ExactReduction(compute.update.buckets, compute.plan.microbatches, world)


def build_run(
    config: Config,
    source: Source,
    compute: Compute,
    checkpointer: Checkpointer,
    record: RunRecord,
    origin: Origin,
    world: World,
    lifetime: Lifetime,
) -> Run:
    """Start the data loader, and open the observers."""
    plan = compute.plan
    buffers = own_model.copy_buffers(compute.model)  # before rank 0's replace them: what differs must be seen
    # Each process has computed the initial weights and the model's tables, which may differ between kinds of machines.
    world.take_from_main([*compute.model.parameters(), *compute.model.buffers()])
    prepare(config, compute.model)
    if world.size > 1 and world.comm_device.type == "cuda":
        warm_up(world, max(len(bucket.weights) for bucket in compute.update.buckets))
    reduction = make_reduction(config, compute, world)
    audit = None
    if config.health.audit_every:
        audit = Audit(config.health.audit_every, config.run.dir, compute, source, world)
    if audit and isinstance(reduction, ExactReduction):
        reduction.see = audit.see
    mine = world.share(plan.microbatches)
    work = RankSampler(plan, mine, origin.step, config.train.max_steps)
    observers = open_observers(config, record, compute, world, lifetime)
    return Run(
        config=config,
        source=source,
        world=world,
        lifetime=lifetime,
        compute=compute,
        reduction=reduction,
        stats=StatsExchange(world, plan.microbatches, flags=1 + len(FLAGS)),
        times=StepTimes(lifetime.clock, world.device),
        read=DelayedRead(origin.step, flags=1 + len(FLAGS), late=world.device.type == "cuda"),
        mine=mine,
        batches=load(source.train, work, config.data.workers, config.world.timeout_seconds, world.device),
        buffers=buffers,
        checkpointer=checkpointer,
        evaluation=Evaluation(
            compute, config, source, world, lifetime.clock, observers, origin.best_val_loss, stop=lambda: lifetime.stop
        ),
        bad_steps=BadSteps(config, compute, checkpointer, observers, world),
        audit=audit,
        observers=observers,
        reporter=Reporter(config, observers, world, lifetime, compute, origin.step),
        record=record,
        start=origin.step,
    )


def store_the_end(run: Run, loaded: Restored) -> int:
    """Make the run's last snapshot durable, which is only in a node's memory so far."""
    stored = run.checkpointer.make_durable(loaded, run.compute.state())
    if run.world.is_main:
        say(f"step {run.start} was in a node's memory only; now it is durable")
    run.reporter.end(run.start, True, stored)
    run.lifetime.settle()
    run.world.barrier()
    return FINISHED


def announce(run: Run) -> None:
    """Print what this attempt will compute, and on which devices."""
    run.reporter.started(run)
    if not run.world.is_main:
        return
    plan, world = run.compute.plan, run.world
    say(
        f"attempt {run.record.attempt}: steps {run.start + 1} to {run.last_step}, {counted(world.size, 'process')} on "
        f"{world.device.type} ({world.backend}), {counted(plan.microbatches, 'microbatch')} of {plan.micro_size} x "
        f"{run.config.model.block_size} tokens, {sum(p.numel() for p in run.compute.model.parameters()):,} parameters"
    )
    if run.config.reduce == "fast":
        say("reduce=fast: equal bits for another number of processes are not promised")
    if slow := slow_precision(run.config, world.device):
        say(slow)
    if run.audit:
        say(run.audit.cost())
    for line in proportions(plan, run.source, run.config):
        say(line)
