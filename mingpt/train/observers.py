"""Who watches a run: opened in rank 0, once for each attempt."""

import socket
import sys
from collections.abc import Sequence

from rich.console import Console

from mingpt.config.schema import Config
from mingpt.console import say
from mingpt.observe.console import ConsoleLines
from mingpt.observe.earlier import SameBits
from mingpt.observe.events import Observers
from mingpt.observe.gpus import open_gpus
from mingpt.observe.jsonl import MetricsLog
from mingpt.observe.ledger import Accountant, ledger
from mingpt.observe.live import LiveLine
from mingpt.observe.notify import Alarms
from mingpt.observe.profile import Profile
from mingpt.observe.stragglers import Stragglers
from mingpt.observe.trace import Trace
from mingpt.observe.trackers import open_trackers
from mingpt.snapshot.attempts import RunRecord
from mingpt.train.run import Compute
from mingpt.world.lifetime import Lifetime
from mingpt.world.world import World, share


def open_observers(config: Config, record: RunRecord, compute: Compute, world: World, lifetime: Lifetime) -> Observers:
    """The observers of rank 0; none in other processes. Called by all processes."""
    hosts = world.gather(socket.gethostname())
    if not world.is_main:
        return Observers([], say)
    run_dir, price = config.run.dir, config.run.price_per_hour
    live, hook, steps = live_line(config, lifetime), config.health.notify, config.profile.steps
    gpus = open_gpus(world.device)
    metrics = MetricsLog(run_dir, record.attempt, say, more=gpus.row if gpus else dict)
    observers = Observers(
        [
            SameBits(config, record, metrics.write, lambda event: observers.publish(event), say),
            *([Alarms(hook, config.run.name, record.attempt, say)] if hook else []),
            *live,
            ConsoleLines(config.train.max_steps, say, live=bool(live)),
            Trace(run_dir, record.attempt, say),
            metrics,
            *stragglers(config, compute, hosts),
            Accountant(run_dir, lifetime.clock, price, say),
            *([Profile(steps, run_dir, record.attempt, world.device.type == "cuda", say)] if steps else []),
            *open_trackers(config, record, say),
        ],
        say,
    )
    return observers


def stragglers(config: Config, compute: Compute, hosts: Sequence[str]) -> list[Stragglers]:
    ratio, size = config.health.straggler_ratio, len(hosts)
    if not ratio or size == 1:
        return []
    return [Stragglers(hosts, [len(share(rank, size, compute.plan.microbatches)) for rank in range(size)], ratio, say)]


def live_line(config: Config, lifetime: Lifetime) -> list[LiveLine]:
    """The live display, if somebody looks: on a terminal, and not in a log."""
    console = Console(file=sys.stdout)
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        return []
    price, spent = config.run.price_per_hour, 0.0
    if price is not None:
        try:
            spent = (ledger(config.run.dir).cost() or 0.0) + price * sum(lifetime.clock.account().values()) / 3600
        except Exception as error:
            say(f"what earlier attempts have cost is not known: {str(error) or type(error).__name__}")
    return [LiveLine(console, price=price, spent=spent)]
