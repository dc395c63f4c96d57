"""The verbs of `mingpt`, and their parsers. Only the standard library is imported: help and completion answer at once.

A verb is one function, which adds its options and whose docstring is its description (train_verbs.py and others); one
line in VERBS; and one function elsewhere, which is imported by name when the verb runs.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mingpt.cli import data_verbs, run_verbs, snapshot_verbs, train_verbs
from mingpt.cli.command import Parser
from mingpt.cli.options import described
from mingpt.errors import UserError


def completion(parser: Parser) -> None:
    """What a shell evaluates to complete all of this; in bash: eval "$(mingpt completion bash)".

    Example: mingpt completion bash
    """
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


@dataclass(frozen=True)
class Verb:
    """function: `module:name` of this package, of the options; of the words as they are where options is None: Hydra's.

    trains: ends with STOPPED when it is asked to stop. joins: is one of the processes of a world, as torchrun or srun
    starts them. Both get the process's Lifetime, too.
    interrupted: printed after Ctrl-C or SIGTERM, which raise KeyboardInterrupt in it, by a verb that cleans up then.
    """

    help: str
    function: str
    options: Callable[[Parser], None] | None
    trains: bool = False
    joins: bool = False
    interrupted: str = ""


AGAIN = "interrupted: nothing is half written; the same command begins again"
GOES_ON = "interrupted: the same command goes on"
GROUPS = {
    "Train": {
        "train": Verb(
            "train a GPT in this process; with -m, several", "train.attempt:attempt", None, trains=True, joins=True
        ),
        "launch": Verb(
            "train with several, on one node or many", "launch.launcher:launch", train_verbs.launch, trains=True
        ),
        "plan": Verb(
            "say how much memory a run needs, before a machine is rented",
            "commands.plan:plan_command",
            train_verbs.plan,
        ),
        "preflight": Verb(
            "look at the nodes before training",
            "preflight.command:preflight",
            train_verbs.preflight,
            interrupted="stopped",
        ),
        "selftest": Verb(
            "try whether this machine computes right",
            "selftest.check:check",
            train_verbs.selftest,
            interrupted="stopped",
        ),
    },
    "Look and use": {
        "generate": Verb("continue texts with a run's model", "commands.generate:generate_command", run_verbs.generate),
        "evaluate": Verb(
            "say how good a run's model is", "commands.evaluate:evaluate_command", run_verbs.evaluate, joins=True
        ),
        "report": Verb(
            "show what runs have done, as one HTML page", "commands.report:report_command", run_verbs.report
        ),
        "replay": Verb("compute a past step again, and look at it", "commands.replay:replay_command", run_verbs.replay),
        "snapshots": Verb("list, verify, prune or rewind a run's snapshots", "", snapshot_verbs.snapshots),
        "log": Verb("show runs, forks, attempts and snapshots as a tree", "commands.log:log_command", run_verbs.log),
        "diff": Verb("say where two runs parted, and by what", "commands.diff:diff_command", run_verbs.diff),
        "fork": Verb("begin a run from a step of another one", "commands.fork:fork_command", run_verbs.fork),
        "rewind": Verb(
            "take a run back to an earlier step, or undo that",
            "commands.snapshots:rewind_command",
            snapshot_verbs.rewind,
        ),
        "export": Verb(
            "write a run's model for transformers serve, vLLM and others",
            "commands.export:export_command",
            snapshot_verbs.export,
        ),
    },
    "Prepare": {
        "fetch": Verb(
            "get a corpus or a vocabulary", "prepare.fetch:fetch_command", data_verbs.fetch, interrupted=AGAIN
        ),
        "prepare": Verb(
            "turn text into token shards", "prepare.prepare:prepare_command", data_verbs.prepare, interrupted=GOES_ON
        ),
        "completion": Verb("have bash, zsh or fish complete this", "cli.completion:completion_command", completion),
    },
}
VERBS = {name: verb for group in GROUPS.values() for name, verb in group.items()}


CODES = ": 0 done; 64 an error that the user must fix; 70 crashed, try again"


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a verb."""
    verb = VERBS[name]
    if verb.options is None:
        from mingpt.compose.commandline import parser  # imports Hydra, which takes half a second: completion alone asks

        return parser()
    about, codes, example = described(verb.options)
    made = Parser(prog=f"mingpt {name}", description=about, epilog=f"Exit codes{codes or CODES}")
    made.example = example
    made.set_defaults(function=verb.function)
    verb.options(made)
    return made


def parse(name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, and the `function` that they are for. Ends the process at a mistake."""
    parser = parser_of(name)
    if name in ("launch", "preflight"):  # as in torchrun, options may have underscores: --node_rank
        arguments = [re.sub(r"^--[a-z_]+", lambda m: m[0].replace("_", "-"), argument) for argument in arguments]
    if any(action.dest == "overrides" and not action.option_strings for action in parser._actions):
        return parser.parse_intermixed_args(arguments)
    try:
        return parser.parse_args(arguments)
    except UnicodeDecodeError as error:
        raise UserError(f"@FILE is not UTF-8 at byte {error.start}: convert it") from error
