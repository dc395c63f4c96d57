"""One attempt as its processes live it: config -> data -> model -> world -> training; each end has its exit code."""

import json
import os
import traceback

from mingpt.compute.numerics import differences
from mingpt.config import compose
from mingpt.config.affecting import settings
from mingpt.config.checks import missing_places
from mingpt.config.moment import MOMENT
from mingpt.config.schema import Config
from mingpt.console import complain, say
from mingpt.data.source import Source
from mingpt.errors import FINISHED, UserError
from mingpt.redact import without_secrets
from mingpt.train import session
from mingpt.train.factory import build
from mingpt.world.failures import explain
from mingpt.world.joining import Left, join, speaks_for_node, world_size
from mingpt.world.lifetime import AGENT_PID, OVERRIDES, Lifetime, leave_reason
from mingpt.world.platforms import refuse_to_be_alone
from mingpt.world.world import World

SPEAK_SECONDS = 10  # after which a mistake that this process alone has found is printed, too


def attempt(arguments: list[str], lifetime: Lifetime) -> int:
    """Train as the command line says; returns the exit code."""
    lifetime.clock.enter("data")
    config: Config | None = None
    try:
        refuse_to_be_alone(os.environ)
        arguments = [*_handed_on(), *arguments]
        config = compose.configure(arguments, world_size())
        if config is None:  # --help or --cfg has been answered
            return FINISHED
        if "RANK" in os.environ and MOMENT not in os.environ:
            compose.refuse_the_time(arguments)
        source = _opened(config)
        model = build(config, source.vocabulary.size)
        lifetime.clock.enter("rendezvous")
        with join(config.world) as world:
            lifetime.clock.enter("load")
            lifetime.join_world()
            try:
                agree_on_inputs(world, config, source)
                if world.is_main:
                    say(compose.as_yaml(config))
                return session.train(config, source, model, world, lifetime)
            except (Exception, KeyboardInterrupt, SystemExit) as error:
                raise Left(tell(error, lifetime)) from error  # first: who leaves a world may have to wait for others
    except Left as left:
        return left.code
    except SystemExit as error:
        if config is None:  # argparse's
            raise
        return tell(error, lifetime)  # of code of the user's own: only a run that is finished may end with 0
    except (Exception, KeyboardInterrupt) as error:
        return tell(error, lifetime)


def _opened(config: Config) -> Source:
    """The data. Raises UserError, with the other places that are not there: one start finds all."""
    try:
        return config.data.open(config.model.block_size, config.batch.micro_size)
    except UserError as mistake:
        raise UserError(*mistake.problems, *missing_places(config, mistake.problems)) from mistake


def _handed_on() -> list[str]:
    """The overrides that mingpt.launch has for its workers."""
    overrides = os.environ.pop(OVERRIDES, "[]")
    return [str(text) for text in json.loads(overrides)] if os.environ.get(AGENT_PID) == str(os.getppid()) else []


def tell(error: BaseException, lifetime: Lifetime) -> int:
    """Say in one line what has ended this process, once for all the processes that it has ended; returns the code."""
    failure = explain(error, lifetime.phase)
    leave_reason(failure.reason)
    told_by_another = isinstance(error, UserError) and error.everywhere and not speaks_for_node()
    # The process that speaks has found the same: it prints, exits, and torchrun ends this one. Exiting first would
    # have torchrun end that one before it has printed.
    if told_by_another and lifetime.linger(SPEAK_SECONDS):
        return failure.code
    if failure.trace:
        trace = "".join(traceback.format_exception(error)).splitlines()
        complain("\n".join(str(without_secrets(line)) for line in trace))
    complain(f"error: {failure.reason}")
    return failure.code


def agree_on_inputs(world: World, config: Config, source: Source) -> None:
    """Raise UserError in every process unless all have the same config and the same data.

    Where a node finds and caches the data, and how it loads them, is its own affair; that it is the same data is not.
    """
    inputs = config.model_dump()
    affecting = settings(inputs)[1]
    data = {k: v for k, v in inputs["data"].items() if f"data.{k}" in affecting}
    first, *others = world.gather({"data.sha256": source.sha256} | inputs | {"data": data})
    for rank, inputs in enumerate(others, 1):
        if changed := differences(first, inputs):
            # Where only a secret differs, the keys alone are told.
            shown = ", ".join(
                differences(without_secrets(first), without_secrets(inputs)) or (c.split(":")[0] for c in changed)
            )
            raise UserError(f"process {rank} has other settings or data than process 0: {shown}")
