"""`mingpt completion SHELL`: what a shell evaluates in order to complete `mingpt …`, and what it then asks at a TAB.

The shell starts `mingpt` with the line so far in its environment, and argcomplete finds in the verb's own parser what
may follow. Overrides of the config are completed here: groups and their options, sections, keys, and the words that a
key takes.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import argcomplete

from mingpt.command import program
from mingpt.console import say
from mingpt.errors import FINISHED

if TYPE_CHECKING:
    from mingpt.cli import Verb

SHELLS = ("bash", "zsh", "fish")
# Their `overrides` are those of a run; what evaluate takes are a few of them.
OF_A_RUN = ("train", "launch", "preflight", "fetch")
EPILOG = """Switch it on in your shell's start-up file:
  bash  eval "$(mingpt completion bash)"
  zsh   eval "$(mingpt completion zsh)"     (after compinit)
  fish  mingpt completion fish | source"""


def answer(verbs: "Mapping[str, Verb]") -> None:
    """Tell the shell how the word under the cursor may go on, and end."""
    words = argcomplete.split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))[3]
    if len(words) > 1 and words[1] in verbs:
        verb = verbs[words[1]]
        parser = import_module(verb.options or verb.module).parser()
        if not verb.several:
            os.environ["_ARGCOMPLETE"] = "2"  # the parser's own words begin after the verb
        for action in parser._actions:
            if action.dest == "overrides" and words[1] in OF_A_RUN:
                action.completer = overrides
    else:
        parser = argparse.ArgumentParser()
        if len(words) == 1:
            parser.add_argument("--version", action="store_true", help="which versions are here")
            commands = parser.add_subparsers()
            for name, verb in verbs.items():
                commands.add_parser(name, help=verb.help)
    argcomplete.autocomplete(parser, always_complete_options=False)  # which ends the process


def overrides(prefix: str, parsed_args: argparse.Namespace | None = None, **_: Any) -> dict[str, str]:
    """How an override may go on, each with its help text. Of a section that is only begun, its name."""
    from mingpt.config.groups import groups
    from mingpt.config.keys import choices, keys

    folder = getattr(parsed_args, "config_dir", None)
    options, known = groups([Path(folder)] if folder else []), keys()
    key, equals, _value = prefix.partition("=")
    if equals:
        found = dict(options.get(key, {}))
        if key in known:
            found |= {word: "" for word in choices(key) if isinstance(word, str)}
        return {f"{key}={word}": text for word, text in found.items()}
    every = {f"{group}=": f"one of {', '.join(names)}" for group, names in options.items()}
    every |= {f"{name}=": text for name, text in known.items()}
    found = {}
    for word, text in every.items():
        section, dot, _name = word.partition(".")
        if dot and "." not in prefix:
            word, text = f"{section}.", f"the keys of {section}"
        if word.startswith(prefix):
            found[word] = text
    if len(found) == 1 and (word := next(iter(found))).endswith("."):
        return overrides(word, parsed_args)  # or the shell would end the word here
    return found


def parser() -> argparse.ArgumentParser:
    from mingpt.config.commandline import Parser

    parser = Parser(
        prog=program("mingpt.completion"),
        description="Print what makes a shell complete verbs, options, and groups and keys of the config.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    return parser


def main() -> NoReturn:
    say(argcomplete.shellcode(["mingpt"], shell=parser().parse_args().shell))
    sys.exit(FINISHED)


if __name__ == "__main__":
    main()
