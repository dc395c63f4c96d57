"""The `mingpt launch` command: validate the config, compose a torchrun command, print it, run it, print the reason."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

import mingpt
from mingpt.config import compose
from mingpt.config.moment import MOMENT
from mingpt.config.schema import Config
from mingpt.console import complain, say
from mingpt.errors import CRASHED, FINISHED, USER_ERROR, UserError
from mingpt.launch.torchrun import Torchrun, parse
from mingpt.observe.notify import notify
from mingpt.world.lifetime import AGENT_PID, OVERRIDES, STOP_SIGNALS, Lifetime


def launch(arguments: list[str], lifetime: Lifetime) -> int:
    """Train on this node; returns the exit code. The last line of the output is the reason."""
    try:
        options = parse(arguments)  # --help ends here
        refuse_another_package()
        os.environ[MOMENT] = str(time.time())
        node = Torchrun.compose(options, os.environ)
        config = compose.configure(node.overrides, node.fewest_processes)
        assert config is not None  # the parser has answered --help
        if node.most > 1:  # ${now:…} would have another value on each node
            compose.refuse_the_time(node.overrides)
        command = node.command(config)
        say(f"launch: {command}")
        if options.dry_run:
            return FINISHED
        node.check(os.environ)
    except UserError as error:
        complain(f"error: {error}")
        return USER_ERROR
    for_workers = {AGENT_PID: str(os.getpid()), OVERRIDES: json.dumps(command.overrides)}
    os.environ.update(command.environment | for_workers)
    # Imports torch, which takes seconds: errors in the config are printed before that.
    from mingpt.launch.agent import run

    code, reason = run(
        command.arguments,
        limit=config.launch.max_attempts_without_progress,
        answer_seconds=config.world.init_timeout_seconds,
        silent_seconds=config.world.timeout_seconds,
        port=node.port,
        newest=lambda: newest_step(config),
        say=lambda text: say(f"launch: {text}"),
        lifetime=lifetime,
    )
    # The exit code is decided. A signal that comes now must not change it.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    say(f"launch: exit code {code}: {reason}")
    # Each node with a worker that met a user error tells it; that nobody goes on, the first node tells for all.
    if code == USER_ERROR or (code == CRASHED and not node.rank):
        event = "failed" if code == USER_ERROR else "gave up"
        notify(config.health.notify, event, reason, run=config.run.name)
    return code


def refuse_another_package() -> None:
    """Raise UserError if the workers (`python -m`: the current folder comes first) would find another mingpt."""
    found = PathFinder.find_spec("mingpt", [os.getcwd()])
    if found and found.origin and not os.path.samefile(found.origin, mingpt.__file__):
        raise UserError(
            f"the workers would train with {Path(found.origin).parent}, and this launcher is "
            f"{Path(mingpt.__file__).parent}: start in another folder, or run `python -m mingpt.launch` here to use "
            f"the first"
        )


def newest_step(config: Config) -> int:
    """The step of the newest snapshot, durable or in memory; 0 if there is none, or if the store does not answer in
    world.init_timeout_seconds."""
    from mingpt.snapshot.checkpointer import newest

    steps = [0]

    def read() -> None:
        with suppress(Exception):  # the workers run into the same error, and report it
            steps.append(newest(config))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(config.world.init_timeout_seconds)
    return max(steps)
