"""How a program of this package takes its options, and ends: each error in one line, with its exit code."""

import argparse
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn

from mingpt.cli.console import complain, printable
from mingpt.errors import CRASHED, USER_ERROR, TransientError, UserError, exit_now

INTERRUPTED = 130  # as shells report a program that was ended by Ctrl-C
UNFIT = 1
CLEAN_SECONDS = 0.7  # for what a command does after Ctrl-C
FROM_ENV = "--from-env"  # takes the variables that every recipe has: EXPERIMENT, RUN_DIR, OVERRIDES
FROM_ENV_HELP = "EXPERIMENT, RUN_DIR and OVERRIDES from the environment, as recipes/ set them"
# OVERRIDES ends a word at a space outside of quotes. The quotes are Hydra's, and stay.
WORD = re.compile(r"""(?:[^\s'"]|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")+""")


class Unfit(Exception):
    """The command ran, and its check failed (a damaged snapshot). Exit 1."""


class Parser(argparse.ArgumentParser):
    """argparse with our exit code for a mistake. example: a whole command, with which the help ends."""

    example = ""

    def format_help(self) -> str:
        return super().format_help() + (f"\nExample: {self.example}\n" if self.example else "")

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """A source of @FILE, which somebody else may have written: no options, and no other files."""
        source = arg_line.removeprefix("\ufeff")  # a byte-order mark
        if not source or source[0] in "-@":
            self.error(f"@FILE: {printable(source)!r} is no source: write one a line, without empty lines")
        return [source]

    def key_for(self, name: str) -> str:
        """The key that somebody means who writes --name."""
        return "train.max_steps"

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            for argument in message.split()[2:]:
                name = argument.partition("=")[0]
                if name.startswith("-") and ("_" in name or "." in name):
                    key = self.key_for(name.strip("-"))
                    message = f"unrecognized arguments: {argument}: keys have no dashes: write {key}=…"
                if name in ("-m", "--multirun"):
                    message = f"unrecognized arguments: {argument}: that is for `mingpt train` (docs/sweeps.md)"
        complain(f"error: {message}; see --help")
        sys.exit(USER_ERROR)


def quoted(text: str) -> str:
    """A text as a value of Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def expanded(verb: str, arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The arguments of a verb, with what a recipe's variables say in the place of --from-env."""
    if FROM_ENV not in arguments:
        return [*arguments]
    experiment, run_dir, text, processes = (
        environment.get(name, "").strip() for name in ("EXPERIMENT", "RUN_DIR", "OVERRIDES", "NPROC_PER_NODE")
    )
    if WORD.sub("", text).strip():
        raise UserError(f"OVERRIDES={text}: a quote is not closed: close it, or leave it out")
    if verb == "evaluate":
        found = [run_dir]
    else:
        found = [f"experiment={experiment}"] if experiment else []
        found += [f"run.dir={quoted(run_dir)}"] if run_dir else []
        if processes and verb in ("launch", "preflight"):
            found.append(f"--nproc-per-node={processes}")
    at = arguments.index(FROM_ENV)
    return [*arguments[:at], *found, *WORD.findall(text), *arguments[at + 1 :]]


def code_of(act: Callable[[], int], interrupted: str = "") -> int:
    """The exit code of what a program does. Prints its errors, and `interrupted` after Ctrl-C."""
    try:
        return act()
    except SystemExit as end:  # of a parser, after --help or a mistake
        if isinstance(end.code, str):  # of a user's own code
            raise
        return end.code or 0
    except (UserError, TransientError, Unfit) as error:
        complain(f"error: {error}")
        if isinstance(error, Unfit):
            return UNFIT
        return USER_ERROR if isinstance(error, UserError) else CRASHED
    except KeyboardInterrupt as end:
        if interrupted:
            complain(interrupted)
        return end.args[0] if end.args else INTERRUPTED
    except Exception:  # a bug of ours: not 1, which says that a check has failed
        complain(traceback.format_exc().rstrip("\n"))  # not print_exc, which blanks no secret in the error's text
        return CRASHED


@contextmanager
def raising() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt here, for a command that cleans up then."""

    def stop(number: int, frame: object) -> NoReturn:
        limit = threading.Timer(CLEAN_SECONDS, exit_now, [128 + number])
        limit.daemon = True
        limit.start()
        raise KeyboardInterrupt(128 + number)

    # If the limit ends this process, multiprocessing's tracker frees what is left, and would warn of it.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
