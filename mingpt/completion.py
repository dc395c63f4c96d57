"""`mingpt completion SHELL`: what a shell evaluates to complete verbs, options and groups, by argcomplete."""

import argparse
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

import argcomplete

from mingpt.command import program
from mingpt.console import say
from mingpt.errors import FINISHED

if TYPE_CHECKING:
    from mingpt.cli import Verb


def answer(verbs: "Mapping[str, Verb]") -> None:
    """Tell the shell how the word under the cursor may go on, and end."""
    words = argcomplete.split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    if len(words) > 1 and words[1] in verbs:
        verb = verbs[words[1]]
        parser = import_module(verb.options or verb.module).parser()
        if not verb.several:
            os.environ["_ARGCOMPLETE"] = "2"  # the parser's own words begin after the verb
        for action in parser._actions:
            if action.dest == "overrides":
                action.completer = _overrides
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("verb", choices=[*verbs])
    argcomplete.autocomplete(parser, always_complete_options=False)  # which ends the process


def _overrides(**_: object) -> list[str]:
    from mingpt.config.groups import groups

    return [f"{group}={option}" for group, options in groups().items() for option in options]


def parser() -> argparse.ArgumentParser:
    from mingpt.config.commandline import Parser

    parser = Parser(prog=program("mingpt.completion"), description='In bash: eval "$(mingpt completion bash)"')
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def main() -> NoReturn:
    say(argcomplete.shellcode(["mingpt"], shell=parser().parse_args().shell))
    sys.exit(FINISHED)


if __name__ == "__main__":
    main()
