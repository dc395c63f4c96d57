"""`mingpt completion SHELL`: what a shell evaluates to complete verbs, options and groups, by argcomplete."""

import argparse
import os
from typing import Any

import argcomplete

from mingpt.cli.console import put
from mingpt.cli.parsers import VERBS, parser_of
from mingpt.errors import FINISHED


def answer() -> None:
    """Tell the shell how the word under the cursor may go on, and end."""
    words = argcomplete.split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    if len(words) > 1 and words[1] in VERBS:
        parser: Any = parser_of(words[1])
        os.environ["_ARGCOMPLETE"] = "2"  # the parser's own words begin after the verb
        for action in parser._actions:
            if action.dest == "overrides":
                action.completer = _overrides
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("verb", choices=[*VERBS])
    argcomplete.autocomplete(parser, always_complete_options=False)  # which ends the process


def _overrides(**_: object) -> list[str]:
    from mingpt.compose.groups import groups  # imports Hydra, which takes half a second: few words need it

    return [f"{group}={option}" for group, options in groups().items() for option in options]


def completion_command(options: argparse.Namespace) -> int:
    put(f"{argcomplete.shellcode(['mingpt'], shell=options.shell)}\n")  # a program, which must stay as it is
    return FINISHED
