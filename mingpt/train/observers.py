"""Opens the observers of an attempt: who hears of its events, in which order."""

import socket
import sys
from collections.abc import Sequence

from rich.console import Console

from mingpt.cli.console import say
from mingpt.compute.tree import shares
from mingpt.config.schema import Config
from mingpt.observe.console import ConsoleLines
from mingpt.observe.events import Observer, Observers
from mingpt.observe.jsonl import MetricsLog
from mingpt.observe.ledger import Accountant
from mingpt.observe.live import LiveLine
from mingpt.observe.notify import Alarms
from mingpt.observe.own import OwnObserver
from mingpt.observe.profile import Profile
from mingpt.observe.stragglers import Stragglers
from mingpt.observe.trace import SameBits, Trace
from mingpt.observe.trackers import open_trackers
from mingpt.snapshot.attempts import RunRecord
from mingpt.train.context import StepContext
from mingpt.world.lifetime import Lifetime


def open_observers(config: Config, record: RunRecord, context: StepContext, lifetime: Lifetime) -> Observers:
    """Open those of rank 0; other processes have none. Called by all processes."""
    world = context.world
    hosts = world.gather(socket.gethostname())
    if not world.is_main:
        return Observers([], say)
    run_dir, attempt = config.run.dir, record.attempt
    live = live_line()
    metrics = MetricsLog(run_dir, attempt, say)
    # Each event goes through the list in this order. What compares a step's bits with those recorded comes before the
    # trace that records them, and the alarm before what may block for a store.
    opened: list[Observer] = [SameBits(config, record, metrics.write, lambda event: observers.publish(event), say)]
    if config.health.notify:
        opened.append(Alarms(config.health.notify, config.run.name, attempt, say))
    opened += live
    opened.append(ConsoleLines(config.train.max_steps, say, live=bool(live)))
    opened.append(Trace(run_dir, attempt, say))
    opened.append(metrics)
    opened += stragglers(config, context, hosts)
    opened.append(Accountant(run_dir, lifetime.clock, config.run.price_per_hour, say))
    if config.profile.steps:
        opened.append(Profile(config.profile.steps, run_dir, attempt, world.device.type == "cuda", say))
    opened += open_trackers(config, record, say)
    for own in config.observers:
        opened.append(OwnObserver(own, say, run_dir=run_dir, attempt=attempt))
    observers = Observers(opened, say)
    return observers


def stragglers(config: Config, context: StepContext, hosts: Sequence[str]) -> list[Stragglers]:
    ratio = config.health.straggler_ratio
    if not ratio or len(hosts) == 1:
        return []
    counts = [*map(len, shares(*context.world.shape, context.plan.microbatches))]
    return [Stragglers(hosts, counts, ratio, say)]


def live_line() -> list[LiveLine]:
    """The live display, if somebody looks: on a terminal, and not in a log."""
    console = Console(file=sys.stdout)
    return [LiveLine(console)] if sys.stdout.isatty() and not console.is_dumb_terminal else []
