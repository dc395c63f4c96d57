"""`python -m mingpt.launch [options] [overrides]`: the one command to start on each node.

It composes a torchrun command, prints it, and runs it through torch's own elastic agent. What it adds to torchrun: the
config is validated before any worker starts; nodes and addresses come from the platform, if there is one; torchrun's
options are set for runs that get killed, moved and resized; workers are restarted as long as snapshots progress; and
the exit code says what to do: 0 finished, 64 fix a mistake, 70 crashed: try again, 75 stopped on request: start again.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

from mingpt import cli
from mingpt.config import Config
from mingpt.errors import FINISHED, MISTAKE, STOPPED, Mistake
from mingpt.lifetime import AGENT_PID, STOP_SIGNALS
from mingpt.torchrun import Torchrun, options_parser


class Stopped(BaseException):
    """A signal before there is a worker to hand it to. No Exception: nothing on its way may take it for an error."""


def main(arguments: list[str]) -> int:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)  # until the agent starts workers and sets its own
    try:
        options = options_parser().parse_intermixed_args(arguments)
        node = Torchrun.compose(options, os.environ)
        config = cli.configure(node.overrides, node.fewest_processes)
        assert config is not None  # the parser has answered --help
        command = node.command(config)
        say(str(command))
        if options.dry_run:
            return FINISHED
        node.check_port()
        os.environ.update(command.environment | {AGENT_PID: str(os.getpid())})
        # Not before: torch takes seconds to import, and a mistake in the config is told at once.
        from mingpt.agent import run

        limit = config.launch.max_attempts_without_progress
        code, reason = run(
            command.arguments, limit, config.world.init_timeout_seconds, lambda: newest_step(config), say
        )
    except Mistake as mistake:
        print(f"error: {mistake}", file=sys.stderr, flush=True)
        return MISTAKE
    except Stopped:
        code, reason = STOPPED, "stopped on request before anything started"
    sys.stderr.flush()
    say(f"exit code {code}: {reason}")
    return code


def say(text: str) -> None:
    print(f"launch: {text}", flush=True)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped


def newest_step(config: Config) -> int:
    """The step of the newest snapshot in either tier; 0 if there is none, or if the store does not tell in time."""
    from mingpt.snapshot.tiers import newest

    found = [0]

    def look() -> None:
        with suppress(Exception):  # the workers meet the same problem, and tell it
            found.append(newest(config))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(config.world.init_timeout_seconds)
    return max(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
