"""From the command line to a Config: Hydra composes the files and applies the overrides, and
config/validation.py judges what comes out.

`@hydra.main` stops at the first mistake, with exit code 1. So a run's config is composed by `hydra.compose`, and what
Hydra refuses is found one by one. Options that only print are answered by `@hydra.main`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from mingpt.cli.console import say
from mingpt.compose import resolvers
from mingpt.compose.commandline import CommandLine
from mingpt.compose.help import help_text
from mingpt.compose.overrides import chosen_kinds, composed_of, first_line
from mingpt.compose.printing import PRINTS, printed
from mingpt.config.keys import FOLLOWED, KINDS, keys, leaves
from mingpt.config.names import unknown
from mingpt.config.schema import Config
from mingpt.config.validation import validate
from mingpt.errors import FINISHED, UserError

NOT_SET = ": not set: "
UNSET = re.compile(r"Environment variable '(\w+)' not found")


def configure(arguments: Sequence[str], world_size: int = 1, trains: bool = True) -> Config:
    """The validated config of a command line.

    trains: whether it is this Python that will train, and so must have the trackers' packages.

    Raises errors.UserError with every problem in it, or for an option that only prints: `printing` answers those.
    """
    line = CommandLine.of(arguments)
    if any(getattr(line.options, name) for name in PRINTS):
        raise UserError("--help, --cfg and the like only print: write `mingpt train --cfg job`, or leave them out")
    _, composed, problems = composed_of(line)
    follows = follows_of(composed)
    raw, unresolved = resolved(composed, follows)
    return validate(
        raw,
        world_size,
        also=(*problems, *unresolved),
        follows=follows,
        typed=_typed(line),
        places=any(NOT_SET in text for text in unresolved),
        trains=trains,
    )


def printing(arguments: list[str]) -> int:
    """`mingpt train --help`, `--cfg` and the like: nothing is trained. Raises UserError."""
    line = CommandLine.of(arguments)
    if line.options.help:
        say(help_text(line.folders))
    elif line.options.shell_completion:
        say(printed(line, line.options.overrides))
    else:
        overrides, composed, problems = composed_of(line)
        raw, unresolved = resolved(composed, follows_of(composed))
        problems += [unknown(key, raw) for key in raw if key not in Config.model_fields]
        if line.options.resolve:
            problems += unresolved
        if problems:
            raise UserError(*problems)
        say(printed(line, [o for o in overrides if o.startswith("hydra") or not line.options.hydra_help]))
    return FINISHED


def refuse_the_time(arguments: Sequence[str]) -> None:
    """Raise UserError if values of the config follow the clock (`${now:…}`), for a run of several starts."""
    if not resolvers.asked:
        return
    _, composed, _ = composed_of(CommandLine.of(arguments))
    unresolved: Any = OmegaConf.to_container(composed, resolve=False)
    if timed := [key for key, value in leaves(unresolved) if resolvers.ASKS.search(str(value))]:
        raise UserError(
            f"{', '.join(timed)}: ${{now:…}} is another time in each process and at each restart, which would begin "
            f"another run: write the value out, or take one that stays, such as ${{oc.env:SLURM_JOB_ID}}"
        )


def _typed(line: CommandLine) -> set[str]:
    """The keys of sections that the command line names, `section={key: …}` too."""
    names = set[str]()
    for override in line.overrides:
        section, _, rest = override.key_or_group.partition(".")
        value = override.value()
        if isinstance(value, dict) and not rest:
            names.update(f"{section}.{name}" for name in value)
        else:
            names.add(f"{section}.{rest.partition('.')[0]}")
    return names


def follows_of(composed: DictConfig) -> dict[str, list[str]]:
    """For each key that takes its value from others (`${…}`), those others."""
    out: dict[str, list[str]] = {}
    for key in keys(chosen_kinds(composed)):
        section, _, name = key.rpartition(".")
        holder = composed.get(section) if section else composed
        if isinstance(holder, DictConfig) and OmegaConf.is_interpolation(holder, name):
            raw = OmegaConf.to_container(holder, resolve=False)
            assert isinstance(raw, dict)
            out[key] = FOLLOWED.findall(str(raw[name]))
    return out


def resolved(composed: DictConfig, follows: Mapping[str, Sequence[str]]) -> tuple[dict[str, Any], list[str]]:
    """Resolve interpolations. Returns the plain dict, and a problem per failure, at the key where the chain starts."""
    failed: dict[str, str] = {}

    def plain(node: DictConfig, prefix: str) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key in node:
            name = f"{prefix}{key!s}"
            try:
                value = node[key]
                if isinstance(value, DictConfig):
                    out[str(key)] = plain(value, f"{name}.")
                else:
                    out[str(key)] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            except MissingMandatoryValue:
                failed[name] = f"{name}{NOT_SET}give {name}=…"
            except OmegaConfBaseException as error:
                line = first_line(error)
                unset = UNSET.search(line)
                cure = f"{unset[1]} is not set: set it, or write ${{oc.env:{unset[1]},default}}" if unset else line
                failed[name] = f"{name}: {cure}"
        return out

    raw = plain(composed, "")
    if NOT_SET in failed.get("data.path", "") and (
        missing := KINDS["data"][chosen_kinds(composed)["data"]["kind"]].missing
    ):
        failed["data.path"] = f"data.path{NOT_SET}{missing}"
    causes = list[str]()
    for name, problem in failed.items():
        follows_a_failed_one = not failed.keys().isdisjoint(follows.get(name, ()))
        # In a cycle every key depends on a failed one; report them all, or none would be reported.
        if "Recursive" in problem or not follows_a_failed_one:
            causes.append(problem)
    return raw, causes
