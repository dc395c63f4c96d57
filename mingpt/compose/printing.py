"""What `mingpt train --cfg`, `--info` and the like print: Hydra answers as a program, and secrets are taken out."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from mingpt.cli.console import as_lines
from mingpt.cli.redact import BLANK, is_secret, without_secrets
from mingpt.compose.commandline import FIRST, CommandLine, options_given
from mingpt.errors import UserError

PRINTS = ("help", "cfg", "info", "hydra_help", "shell_completion")  # Hydra's options that only print


def printed(line: CommandLine, overrides: Sequence[str]) -> str:
    """What Hydra prints as a program, without secrets."""
    options = vars(line.options)
    words = [f"--{name.replace('_', '-')}" + (f"={options[name]}" if options[name] is not True else "")
               for name in (*PRINTS[1:], "package", "resolve") if options[name]]  # fmt: skip
    before, sys.argv = sys.argv, [sys.argv[0], *options_given(line.options), *words, *map(blanked, overrides)]
    try:
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as wrong:
            hydra.main(config_path=line.main, config_name=FIRST, version_base="1.3")(lambda _: None)()
    except (SystemExit, ValueError) as end:
        if message := wrong.getvalue().strip() or str(end).strip("0"):
            raise UserError(message) from end
    finally:
        sys.argv = before
    return as_lines(_without_secrets(out.getvalue().rstrip("\n").split("\n")))


def blanked(override: str) -> str:
    """An override without secrets that Hydra can read. (In its answer, which folds long lines, some are missed.)"""
    text = str(without_secrets(override))
    if text == override:
        return text
    try:
        OverridesParser.create().parse_override(text)
    except HydraException:
        return f"{without_secrets(override.partition('=')[0])}='{BLANK}'"
    return text


def _without_secrets(lines: Iterable[str]) -> Iterator[str]:
    """Lines of YAML, or of another text."""
    secret, depth = False, 0
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if secret and indent > depth:
            continue  # of a secret that is longer than a line
        key, mark, value = line.partition(": ")
        secret, depth = bool(mark) and value != "null" and is_secret(key.strip(), value), indent
        yield f"{key}: '{BLANK}'" if secret else line
