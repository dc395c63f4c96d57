"""`mingpt launch [options] [overrides]`: the one command to start on each node.

It composes a torchrun command, prints it, and runs it through torch's elastic agent; the last line is the reason for
which it ends. It adds to torchrun:
- the config is validated before any worker starts;
- the number of nodes and their addresses come from the platform, if there is one;
- torchrun's options are set for runs that get killed, moved and resized;
- workers are restarted as long as attempts leave new snapshots.
"""

import json
import os
import signal
import sys
import time
from argparse import Namespace

from mingpt.cli.console import say
from mingpt.compose import compose
from mingpt.compose.resolvers import MOMENT
from mingpt.errors import CRASHED, FINISHED, USER_ERROR
from mingpt.launch.managed import managed
from mingpt.launch.torchrun import Torchrun
from mingpt.world.env import AGENT_PID, OVERRIDES
from mingpt.world.lifetime import STOP_SIGNALS, Lifetime
from mingpt.world.standby import Standby


def launch(options: Namespace, lifetime: Lifetime) -> int:
    """Train on this node; returns the exit code. The last line of the output is the reason."""
    if options.platform:
        return managed(lifetime)
    os.environ[MOMENT] = str(time.time())
    node = Torchrun.compose(options, os.environ)
    config = compose.configure(node.overrides, node.fewest_processes)
    if node.most > 1:  # ${now:…} would have another value on each node
        compose.refuse_the_time(node.overrides)
    command = node.command(config)
    say(f"launch: {command}")
    if options.dry_run:
        return FINISHED
    node.check(os.environ)
    for_workers = {AGENT_PID: str(os.getpid()), OVERRIDES: json.dumps(command.overrides)}
    os.environ.update(command.environment | for_workers)
    # With more threads, numpy's BLAS has some as soon as it is imported: the standby could not fork.
    warm = config.train.threads == 1 and os.environ.get("MINGPT_STANDBY") != "0" and sys.platform == "linux"
    seconds = config.world.init_timeout_seconds / 2  # the other half is for a cold start
    standby = Standby(seconds, config.train.compile) if warm else None
    # These import torch, which takes seconds: errors in the config are printed before that, and the standby imports it
    # at the same time.
    from mingpt.launch.agent import run
    from mingpt.observe.notify import notify

    code, reason = run(command.arguments, config, node.port, lambda text: say(f"launch: {text}"), lifetime, standby)
    # The exit code is decided. A signal that comes now must not change it.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    say(f"launch: exit code {code}: {reason}")
    # Each node with a worker that met a user error tells it; that nobody goes on, the first node tells for all.
    if code == USER_ERROR or (code == CRASHED and not node.rank):
        event = "failed" if code == USER_ERROR else "gave up"
        notify(config.health.notify, event, reason, run=config.run.name)
    return code
