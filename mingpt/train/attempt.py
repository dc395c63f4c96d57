"""One attempt in one process: config, data, model, world, training. Every way out has an exit code."""

import json
import os
import socket
import traceback

from mingpt.cli.console import complain, say
from mingpt.compose import compose
from mingpt.config.checks import missing_places
from mingpt.config.configfile import overrides_line
from mingpt.config.schema import Config
from mingpt.data.opening import open_data
from mingpt.data.source import Source
from mingpt.errors import UserError
from mingpt.tiers.home import HomeSearch
from mingpt.train import assemble
from mingpt.train.agreeing import agree_on_inputs
from mingpt.train.evaluation import sample_prompt
from mingpt.train.factory import build, first_weights
from mingpt.world import notice
from mingpt.world.env import OVERRIDES, Env
from mingpt.world.failures import classify
from mingpt.world.joining import Opening, ReportedFailure, join
from mingpt.world.lifetime import Lifetime, Phase, leave_reason
from mingpt.world.platforms import require_launcher

PRINT_SECONDS = 10  # time for the node's main process to find and print the same user error


def attempt(arguments: list[str], lifetime: Lifetime) -> int:
    """Train; returns the exit code. arguments: the config's overrides."""
    # From here on each second of the process belongs to a named part of a start, which the first step's line tells.
    lifetime.clock.enter("data")
    config: Config | None = None
    try:
        require_launcher(os.environ)
        env = Env.read()
        arguments = [*_launcher_overrides(env), *arguments]
        config = compose.configure(arguments, env.size)
        Env.read(check=True)  # after the config's problems, which are the user's first
        if env.launched and not env.ours:
            compose.refuse_the_time(arguments)
        # A thread opens the GPU while the data are opened and the model is built: both take seconds.
        opening = Opening(config.world, env.local_rank)
        watched = notice.watch(config.world.notice, say)
        source = _open_data(config)
        with lifetime.clock.within("model"):
            model = build(config, source.vocabulary.size, drawn=False)
        # Only a check: a prompt that can't be spelled should end the run here, not at its first text.
        if config.train.sample_every:
            sample_prompt(config, source.vocabulary)
        lifetime.clock.enter("device")
        device = opening.device()
        lifetime.clock.enter("rendezvous")
        search = HomeSearch(config)
        with join(config.world, device, search.settle) as world:
            lifetime.phase = Phase.JOINED
            try:
                agree_on_inputs(world, config, source)
                if world.is_main:
                    say(overrides_line(arguments, config))
                seconds, home = watched.grace_seconds, search.home
                return assemble.train(config, source, model, first_weights, world, lifetime, seconds, home)
            except (Exception, KeyboardInterrupt, SystemExit) as error:
                lifetime.ending = True
                # Printed here, before `join` leaves the world: leaving may wait for other processes.
                code = report_failure(error, lifetime, config)
                lifetime.failed(error)
                raise ReportedFailure(code) from error
    # Nothing but the loop's own end returns 0: sys.exit(0) in a user's model was a finished run.
    except ReportedFailure as failure:
        return failure.code
    except SystemExit as error:
        if config is None:  # from argparse
            raise
        return report_failure(error, lifetime)  # from the user's model or data: it must not end the run with 0
    except (Exception, KeyboardInterrupt) as error:
        return report_failure(error, lifetime)


def _open_data(config: Config) -> Source:
    """Open the data. Its UserError also names all other places that do not exist, so that one start finds them all."""
    try:
        return open_data(config.data, config.model.block_size, config.batch.micro_size)
    except UserError as error:
        raise UserError(*error.problems, *missing_places(config, error.problems)) from error


def _launcher_overrides(env: Env) -> list[str]:
    """The overrides that mingpt.launch has passed to this worker in its environment."""
    overrides = os.environ.pop(OVERRIDES, "[]")
    return [str(text) for text in json.loads(overrides)] if env.ours and env.agent == os.getppid() else []


def report_failure(error: BaseException, lifetime: Lifetime, config: Config | None = None) -> int:
    """Print why this process ends, once per node if all processes fail alike; returns the exit code."""
    failure, env = classify(error, lifetime.phase, config), Env.read()
    leave_reason(failure.reason)
    same_in_main = isinstance(error, UserError) and error.everywhere and env.local_rank
    # The node's main process raises the same error. Wait until it has printed and exited, and torchrun sends SIGTERM to
    # this one. If this process exited first, torchrun would end the main process, perhaps before it has printed.
    if same_in_main and lifetime.wait_for_signal(PRINT_SECONDS):
        return failure.code
    if failure.trace:
        complain("".join(traceback.format_exception(error)).rstrip("\n"))
    where = f"rank {env.rank} on {socket.gethostname()}: " if env.rank else ""
    complain(f"error: {where}{failure.reason}")
    return failure.code
