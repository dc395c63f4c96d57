"""A command line taken apart: options, and overrides in Hydra's grammar."""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from mingpt.config.groups import config_dir, folders
from mingpt.console import complain
from mingpt.errors import USER_ERROR
from mingpt.gone import instead
from mingpt.redact import printable, without_secrets

INFO = ("defaults", "defaults-tree", "plugins", "searchpath")
# Hydra's options that there are not here, and what to do in their place.
NOT_THERE = {
    "--multirun -m": "that is for `mingpt train` (docs/sweeps.md)",
    "--package -p": "--cfg shows the whole config: leave it out",
    "--run -r": "not needed: without options the command starts a run",
    "--config-path -cp": "configs/ is always there: add a folder of your own with --config-dir",
    "--hydra-help": "--help tells the options; docs/hydra.md tells what of Hydra is there",
    "--shell-completion -sc": "--help lists every group and key",
    "--experimental-rerun": "the same command resumes the run",
}
SEARCHPATH = "hydra.searchpath"
# A key, and of its value what needs no quotes, then the first mark that does.
PLAIN = re.compile(r"((?:\+\+?|~)?[a-z_]+(?:\.[a-z_]+)*)=([\w./:@%?+ -]*)([^\n])(.*)", re.ASCII)


def quoted(text: str) -> str:
    """A text as a value of Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


class Parser(argparse.ArgumentParser):
    """argparse with our exit code for a mistake."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """Of @FILE, which somebody else may have written: no options, and no other files."""
        if not arg_line or arg_line[0] in "-@":
            self.error(f"@FILE: {printable(arg_line)!r} is no source: write one a line, without empty lines")
        return [arg_line]

    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            verb = self.prog.replace(".", " ").split()[-1]
            for argument in message.split()[2:]:
                name = argument.partition("=")[0]
                message = instead(f"{verb} {name}", name) or message
                if name.startswith("-") and ("_" in name or "." in name):
                    message = f"unrecognized arguments: {argument}: keys have no dashes: write train.max_steps=5"
                for names, cure in NOT_THERE.items():
                    if name in names.split():
                        message = f"unrecognized arguments: {argument}: {cure}"
        complain(f"error: {without_secrets(message)}; see --help")
        sys.exit(USER_ERROR)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where configs come from: for each program that takes overrides."""
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own with experiment/, model/, …")
    parser.add_argument("--config-name", metavar="NAME", default="train", help="begin with NAME.yaml (train)")


def parser() -> Parser:
    """The options of `mingpt train`."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true", help="list every group and key")
    parser.add_argument("--cfg", choices=["job"], help="print the config and stop")
    parser.add_argument("--info", choices=INFO, const="defaults", nargs="?", help="print what the config is made of")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: print values in place of ${…}")
    add_options(parser)
    parser.add_argument("overrides", nargs="*")
    return parser


def multirun_parser() -> Parser:
    """Hydra's own options, but those that are not for a multirun."""
    return Parser(prog="mingpt train -m", add_help=False, allow_abbrev=False, parents=[get_args_parser()])


def given(options: argparse.Namespace) -> list[str]:
    """These options and the overrides, as arguments for `CommandLine.of`, whatever folder that is called in."""
    folder = [] if options.config_dir is None else [f"--config-dir={Path(options.config_dir).absolute()}"]
    name = [] if options.config_name == "train" else [f"--config-name={options.config_name}"]
    return [*folder, *name, *options.overrides]


@dataclass(frozen=True)
class CommandLine:
    """The parsed options. problems: arguments that are not valid overrides."""

    help: bool
    cfg: bool
    info: str | None
    resolve: bool
    config_name: str
    searchpath: tuple[str, ...]
    overrides: tuple[Override, ...]
    problems: tuple[str, ...]

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "CommandLine":
        """Raises UserError if the folder of --config-dir is not there; ends the process at an unknown option."""
        train = parser()
        options = train.parse_intermixed_args(arguments)
        overrides, problems = _parse(options.overrides)
        searchpath = []
        if options.config_dir is not None:
            folder = Path(options.config_dir).absolute()
            if not folder.is_dir():
                shown = without_secrets(options.config_dir)
                problems.append(f"--config-dir={shown}: there is no such folder: check the spelling")
            else:
                searchpath.append(f"file://{folder}")
        for override in (o for o in overrides if o.key_or_group == SEARCHPATH):
            places = override.value()
            if not isinstance(places, list) or not all(isinstance(place, str) for place in places):
                shown = without_secrets(override.input_line)
                problems.append(f"{shown}: write a list of places: {SEARCHPATH}=[file:///folder]")
            else:
                lost = {place: problem for place in places if (problem := _not_a_place(place))}
                problems += [f"{SEARCHPATH}: {problem}" for problem in lost.values()]
                searchpath += [place for place in places if place not in lost]
        return cls(
            options.help,
            bool(options.cfg),
            options.info,
            options.resolve,
            options.config_name,
            tuple(searchpath),
            tuple(o for o in overrides if not o.key_or_group.startswith("hydra.")),
            tuple(problems),
        )

    @property
    def folders(self) -> list[Path]:
        """Those of the user's own that configs are looked for in."""
        return folders(self.searchpath)

    @property
    def main(self) -> Path:
        """The folder that has the config to begin with; Hydra looks for that in one place, for others in all."""
        places = (config_dir(), *self.folders)
        return next((folder for folder in places if (folder / f"{self.config_name}.yaml").is_file()), config_dir())

    @property
    def for_hydra(self) -> list[str]:
        """The other places, as an override."""
        ours = [] if self.main == config_dir() else [f"file://{config_dir()}"]
        quoted = ",".join("'" + place.replace("'", "\\'") + "'" for place in (*ours, *self.searchpath))
        return [f"{SEARCHPATH}=[{quoted}]"] if quoted else []


def _not_a_place(place: str) -> str | None:
    """What is wrong with a place of the search path, or None."""
    shown = without_secrets(place)
    if "://" in place and not place.startswith(("file://", "pkg://")):
        return f"{shown}: configs are read from file:///folder and pkg://package only"
    found = folders([place])
    if place.startswith("pkg://") and not found:
        return f"there is no package {shown}: check the spelling"
    return None if all(folder.is_dir() for folder in found) else f"there is no folder {shown}: check the spelling"


def _parse(texts: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Parse overrides. Returns them, and a message for each argument that is not one."""
    parser, overrides, problems = OverridesParser.create(), list[Override](), list[str]()
    for text in texts:
        shown = str(without_secrets(text))  # what Hydra refuses is often a URL whose `?` is not in quotes
        try:
            override = parser.parse_override(text)
        except Exception:  # Hydra's, ANTLR's, or Python's
            problem = f"{shown!r} is not an override: write key=value, group=option, +key=value or ~key"
            if parts := PLAIN.fullmatch(text):
                key, plain, mark, rest = parts.groups()
                problem += f"; a value with marks such as {mark} in it stands in quotes of its own: key='a{mark}b'"
                overrides.append(parser.parse_override(f"{key}={quoted(plain + mark + rest)}"))  # it is not missing
            problems.append(problem)
            continue
        if override.is_sweep_override():
            problems.append(f"{shown}: several values are for `mingpt train -m`: give one, or a list as key=[a,b]")
        elif override.key_or_group.startswith("hydra.") and override.key_or_group != SEARCHPATH:
            problems.append(f"{shown}: not used here: set run.dir=…")
        else:
            overrides.append(override)
    return overrides, problems
