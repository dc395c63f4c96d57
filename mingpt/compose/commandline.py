"""A command line taken apart: Hydra's options, and overrides in Hydra's grammar."""

import os
import re
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType

from mingpt.cli.command import FROM_ENV, FROM_ENV_HELP, Parser, quoted
from mingpt.compose.groups import config_dir, folders, groups

PLACES = ("config-dir", "config-name", "config-path")
SEARCHPATH = "hydra.searchpath"
FENCED = re.compile(r"[^\w/\\+.$%*@?|:, {}\[\]-]", re.ASCII)  # what Hydra takes in quotes alone
FIRST = "train"  # .yaml of configs/, which a config begins with


class TrainParser(Parser):
    def key_for(self, name: str) -> str:
        from mingpt.config.names import nearest  # the schema, which nothing else needs so early

        return nearest(name) or super().key_for(name)


def parser() -> Parser:
    """The options of `mingpt train`: Hydra's, and one."""
    own = TrainParser(add_help=False, allow_abbrev=False, parents=[get_args_parser()])
    own.add_argument("--json-schema", action="store_true", help="print the JSON schema of config files, for editors")
    for action in own._actions:
        action.help = str(action.help)  # one is an object of Hydra's, which argparse can't print
        # As those of `launch`, options may have underscores: --config_name.
        for option in action.option_strings:
            if option.startswith("--"):
                own._option_string_actions[f"--{option[2:].replace('-', '_')}"] = action
    own.add_argument(FROM_ENV, action="store_true", help=FROM_ENV_HELP)
    return own


def options_given(options: Namespace) -> list[str]:
    """Where configs come from, whatever folder this is called in."""
    arguments = list[str]()
    for name in PLACES:
        value = getattr(options, name.replace("-", "_"), None)
        if value is not None:
            arguments.append(f"--{name}={value if name == 'config-name' else Path(value).absolute()}")
    return arguments


def given(options: Namespace) -> list[str]:
    """These options and the overrides, as arguments for `CommandLine.of`."""
    return [*options_given(options), *options.overrides]


@dataclass(frozen=True)
class CommandLine:
    """options: Hydra's. problems: arguments that are not valid overrides, and places that are not there."""

    options: Namespace
    overrides: tuple[Override, ...]
    problems: tuple[str, ...]

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "CommandLine":
        """Ends the process at an unknown option."""
        options = (own := parser()).parse_intermixed_args(arguments)
        if options.experimental_rerun:
            own.error("--experimental-rerun reads a pickle: the same command resumes the run")
        overrides, problems = _parse(options.overrides)
        problems += [
            f"--{name}={folder}: there is no such folder: check the spelling"
            for name in ("config-dir", "config-path")
            if (folder := getattr(options, name.replace("-", "_"))) and not Path(folder).is_dir()
        ]
        return cls(options, tuple(overrides), tuple(problems))

    @property
    def name(self) -> str:
        return self.options.config_name or FIRST

    @property
    def main(self) -> str:
        """The folder that Hydra looks in first."""
        return str(Path(self.options.config_path or config_dir()).absolute())

    @property
    def folders(self) -> list[Path]:
        """The folders of the user's own that configs are looked for in, too."""
        own = [Path(self.options.config_dir).absolute()] if self.options.config_dir else []
        for override in self.overrides:
            places = override.value()
            if override.key_or_group == SEARCHPATH and isinstance(places, list):
                own += folders(places)
        return own

    @property
    def for_hydra(self) -> tuple[list[str], list[str]]:
        """The overrides: those that choose files, and values. A plain `key=value` sets a key whether a file has it or
        not: which keys there are is for config/validation.py to say, for all of them at once.
        """
        known, chosen, values = groups(self.folders), list[str](), list[str]()
        for override in self.overrides:
            text = str(override.input_line)
            if _is_group(override, known):
                chosen.append(text)
            else:
                values.append(f"++{text}" if override.type is OverrideType.CHANGE else text)
        return chosen, values


def _is_group(override: Override, known: dict[str, dict[str, str]]) -> bool:
    group = override.key_or_group
    return group in known or group.startswith(("hydra.", "hydra/", "schema/")) or override.package is not None


def _parse(texts: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Parse overrides. Returns them, and a message for each argument that is not one."""
    parser, overrides, problems = OverridesParser.create(), list[Override](), list[str]()
    for text in texts:
        key, mark, value = text.partition("=")
        try:
            override = parser.parse_override(text if key else "(")
        except Exception:  # Hydra's, ANTLR's, or Python's
            problems.append(_cure(text, texts))
            with suppress(Exception):  # the key is not missing
                if mark and key:
                    overrides.append(parser.parse_override(f"{key}={quoted(value)}"))
            continue
        if override.is_sweep_override():
            problems.append(f"{text}: several values are for `mingpt train -m`: give one, or a list as key=[a,b]")
        elif override.key_or_group.startswith("hydra.run."):
            problems.append(f"{text}: a run has a directory of its own: set run.dir=…")
        elif override.key_or_group.startswith("hydra.job."):
            problems.append(f"{text}: it would do nothing here: leave it out; a run's name is run.name=…")
        else:
            overrides.append(override)
    return overrides, [*dict.fromkeys(problems)]


def _cure(text: str, texts: Sequence[str]) -> str:
    """What to say of an argument that is no override: one line for all that blanks have cut."""
    key, mark, value = text.partition("=")
    if any(word.startswith("=") or word.endswith("=") for word in texts):
        return "write key=value without blanks around the =, as in train.max_steps=5"
    what = f"{text!r} is not an override: "
    if not mark and os.path.isfile(text):  # Path's own raises OSError for a long one
        return f"{what}to train on a text of your own, write data=char data.path={text}"
    if value.startswith("~/"):
        return f'{what}~ is not expanded: write "{key}=$HOME{value[1:]}"'
    if key and (marks := dict.fromkeys(FENCED.findall(value))):
        return f"{what}a value with {' '.join(marks)} in it stands in quotes of its own: \"{key}='…'\""
    return f"{what}write key=value, group=option, +key=value or ~key"
