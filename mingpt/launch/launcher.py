"""What mingpt.launch does: validate, compose a torchrun command, print it, run it, and say how it ended."""

import json
import os
import signal
import threading
import time
from contextlib import suppress

from mingpt.config import compose
from mingpt.config.moment import MOMENT
from mingpt.config.schema import Config
from mingpt.console import complain, say
from mingpt.errors import FINISHED, USER_ERROR, UserError
from mingpt.launch.torchrun import Torchrun, parse
from mingpt.world.lifetime import AGENT_PID, OVERRIDES, STOP_SIGNALS, Lifetime


def launch(arguments: list[str], lifetime: Lifetime) -> int:
    """Train on this node as the command line says; returns the exit code, and says the reason last."""
    try:
        os.environ[MOMENT] = str(time.time())
        options = parse(arguments)
        node = Torchrun.compose(options, os.environ)
        config = compose.configure(node.overrides, node.fewest_processes)
        assert config is not None  # the parser has answered --help
        if node.most > 1:  # each node's launcher has a moment of its own
            compose.refuse_the_time(node.overrides)
        command = node.command(config)
        say(f"launch: {command}")
        if options.dry_run:
            return FINISHED
        node.check(os.environ)
    except UserError as mistake:
        complain(f"error: {mistake}")
        return USER_ERROR
    handed_on = {AGENT_PID: str(os.getpid()), OVERRIDES: json.dumps(command.overrides)}
    os.environ.update(command.environment | handed_on)
    # Not before: torch takes seconds to import, and a mistake in the config is told at once.
    from mingpt.launch.agent import run

    code, reason = run(
        command.arguments,
        limit=config.launch.max_attempts_without_progress,
        wait_seconds=config.world.init_timeout_seconds,
        silent_seconds=config.world.timeout_seconds,
        port=node.port,
        newest=lambda: newest_step(config),
        say=lambda text: say(f"launch: {text}"),
        lifetime=lifetime,
    )
    # The end is settled; a signal that comes now must not change the code.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    say(f"launch: exit code {code}: {reason}")
    return code


def newest_step(config: Config) -> int:
    """The step of the newest snapshot in either tier; 0 if there is none, or if the store does not tell in time."""
    from mingpt.snapshot.checkpointer import newest

    found = [0]

    def look() -> None:
        with suppress(Exception):  # the workers meet the same problem, and tell it
            found.append(newest(config))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(config.world.init_timeout_seconds)
    return max(found)
