"""From the command line to a Config: Hydra composes the files and applies the overrides, and validation.py judges what
comes out.

`@hydra.main` stops at the first mistake, with exit code 1. So a run's config is composed by `hydra.compose`, and what
Hydra refuses is found one by one. Options that only print are answered by `@hydra.main`.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from copy import deepcopy
from difflib import get_close_matches
from functools import lru_cache
from io import StringIO
from typing import Any
from warnings import catch_warnings, filterwarnings

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from mingpt.cli.console import as_lines, say
from mingpt.cli.redact import BLANK, is_secret, without_secrets
from mingpt.config import moment
from mingpt.config.commandline import FIRST, CommandLine, options_given
from mingpt.config.groups import Places, defaults, groups, offer
from mingpt.config.help import help_text
from mingpt.config.keys import FOLLOWED, KINDS, keys, kind_of, leaves
from mingpt.config.names import unknown
from mingpt.config.schema import Config
from mingpt.config.validation import validate
from mingpt.errors import UserError

NOT_SET = ": not set: "
UNSET = re.compile(r"Environment variable '(\w+)' not found")
PRINTS = ("cfg", "info", "hydra_help")  # Hydra's options that only print


def configure(arguments: Sequence[str], world_size: int = 1, trains: bool = True) -> Config | None:
    """The validated config of a command line; None if it asked for --help, --cfg or the like, answered on stdout.

    trains: whether it is this Python that will train, and so must have the trackers' packages.

    Raises errors.UserError with every problem in it.
    """
    line = CommandLine.of(arguments)
    if line.options.help:
        say(help_text(line.folders))
        return None
    if line.options.shell_completion:
        say(printed(line, line.options.overrides))
        return None
    overrides, composed, problems = composed_of(line)
    follows = follows_of(composed)
    raw, unresolved = resolved(composed, follows)
    if any(getattr(line.options, name) for name in PRINTS) and not problems:
        wrong = [unknown(key, raw) for key in raw if key not in Config.model_fields]
        if wrong := [*wrong, *(unresolved if line.options.resolve else ())]:
            raise UserError(*wrong)
        say(printed(line, [o for o in overrides if o.startswith("hydra") or not line.options.hydra_help]))
        return None
    return validate(
        raw,
        world_size,
        also=(*problems, *unresolved),
        follows=follows,
        typed=_typed(line),
        places=any(NOT_SET in text for text in unresolved),
        trains=trains,
    )


def printed(line: CommandLine, overrides: Sequence[str]) -> str:
    """What Hydra prints as a program, without secrets."""
    given = vars(line.options)
    options = [f"--{name.replace('_', '-')}" + (f"={given[name]}" if given[name] is not True else "")
               for name in (*PRINTS, "shell_completion", "package", "resolve") if given[name]]  # fmt: skip
    shown = map(_blanked, overrides)
    before, sys.argv = sys.argv, [sys.argv[0], *options_given(line.options), *options, *shown]
    try:
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as wrong:
            hydra.main(config_path=line.main, config_name=FIRST, version_base="1.3")(configure)()
    except (SystemExit, ValueError) as end:
        if told := wrong.getvalue().strip() or str(end).strip("0"):
            raise UserError(told) from end
    finally:
        sys.argv = before
    return as_lines(_without_secrets(out.getvalue().rstrip("\n").split("\n")))


def _blanked(override: str) -> str:
    """An override without secrets that Hydra can read. (In its answer, which folds long lines, some are missed.)"""
    text = str(without_secrets(override))
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


def refuse_the_time(arguments: Sequence[str]) -> None:
    """Raise UserError if values of the config follow the clock (`${now:…}`), for a run of several starts."""
    if not moment.was_asked():
        return
    _, composed, _ = composed_of(CommandLine.of(arguments))
    unresolved: Any = OmegaConf.to_container(composed, resolve=False)
    timed = [key for key, value in leaves(unresolved) if moment.ASKS.search(str(value))]
    if timed:
        raise UserError(
            f"{', '.join(timed)}: ${{now:…}} is another time in each process and at each restart, which would begin "
            f"another run: write the value out, or take one that stays, such as ${{oc.env:SLURM_JOB_ID}}"
        )


def as_yaml(config: Config) -> str:
    """The resolved config for people, without secrets."""
    return OmegaConf.to_yaml(OmegaConf.create(without_secrets(config.model_dump())))


@contextmanager
def hydra_of(line: CommandLine) -> Iterator[None]:
    """hydra.compose looks where the command line says. A place that is not there is an error."""
    offer(line.folders)
    Places.folder = line.options.config_dir
    try:
        with hydra.initialize_config_dir(line.main, version_base="1.3"), catch_warnings():
            filterwarnings("error", "provider=.* is not available")
            moment.register()
            yield
    finally:
        Places.folder = None


def composed_of(line: CommandLine) -> tuple[list[str], DictConfig, list[str]]:
    """The overrides that Hydra takes, what it composes of them, and a problem for each other one."""
    with hydra_of(line):
        good, composed, problems = _at_once(line) or _one_by_one(line)
    # What is not there, or was deleted, has the schema's default, which other keys may refer to.
    whole = OmegaConf.merge(defaults(_kinds(composed)), composed)
    assert isinstance(whole, DictConfig)
    return good, whole, [*line.problems, *problems]


def _at_once(line: CommandLine) -> tuple[list[str], DictConfig, list[str]] | None:
    """What Hydra composes of all overrides, with the schemas of the kinds that come out; None if something is wrong.

    Hydra takes 0.2 CPU seconds for the files, and this asks it once or twice.
    """
    chosen, values = line.for_hydra
    named = {o.key_or_group: str(o.value()) for o in line.overrides}
    if any(f"{section}.{key}" in named for section in KINDS for key in ("kind", "_target_")):
        return None
    kinds = dict[str, dict[str, str]]()
    for section, of in KINDS.items():
        chosen_kind = named.get(section)
        kinds[section] = {"kind": chosen_kind if chosen_kind in of else next(iter(of))}
    for _ in range(2):
        good = [*_schemas(kinds), *chosen]
        try:
            composed = _with(_of_files(line, good), values)
        except Exception:  # _one_by_one() finds which override it is
            return None
        before, kinds = kinds, _kinds(composed)
        if kinds == before:
            return [*good, *values], composed, []
    return None


def _one_by_one(line: CommandLine) -> tuple[list[str], DictConfig, list[str]]:
    """The same for overrides of which some may be wrong, or name a kind by its key."""
    chosen, values = line.for_hydra
    there_are, problems, good = groups(line.folders), list[str](), list[str]()
    try:
        composed = _of_files(line, good)
    except Exception as error:
        raise UserError(*line.problems, f"--config-name={line.name}: {first_line(error)}") from error
    with suppress(Exception):
        composed, good = _of_files(line, chosen), chosen
    for text in chosen if good != chosen else ():
        try:
            composed, good = _of_files(line, [*good, text]), [*good, text]
        except Exception as error:  # Hydra has errors of its own for most slips, and ValueError or TypeError for others
            problems.append(_refused(text, error, there_are))
    for find in (_implied, lambda _, composed: _schemas(_kinds(composed))):
        if more := find(line, composed):
            with suppress(Exception):  # a config of one's own that does not begin with ours
                composed, good = _of_files(line, [*more, *good]), [*more, *good]
    for text in values:
        try:
            composed, good = _with(composed, [text]), [*good, text]
        except Exception as error:
            problems.append(_refused(text.removeprefix("++"), error, there_are))
    return good, composed, problems


def _of_files(line: CommandLine, chosen: Sequence[str]) -> DictConfig:
    """What Hydra composes of the files that these overrides choose."""
    if line.folders or line.options.config_path or line.name != FIRST:  # these may change meanwhile
        return hydra.compose(line.name, [*chosen])
    return _of_ours(*chosen)


@lru_cache(maxsize=64)
def _of_ours(*chosen: str) -> DictConfig:
    return hydra.compose(FIRST, [*chosen])


def _with(composed: DictConfig, values: Sequence[str]) -> DictConfig:
    """A copy with these overrides, applied as Hydra does. (From outside, it would compose all files again.)"""
    composed = deepcopy(composed)
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides([*values]), composed)
    return composed


def _implied(line: CommandLine, composed: DictConfig) -> list[str]:
    """The options of the kinds that keys name: `data.kind=shards` brings that option, as `data=shards` does."""
    given = {o.key_or_group: o.value() for o in line.overrides if not o.is_delete()}
    now = _kinds(composed)
    options = list[str]()
    for section, kinds in KINDS.items():
        if section in given:
            continue
        kind = given.get(f"{section}.kind", "own" if f"{section}._target_" in given else None)
        if isinstance(kind, str) and kind in kinds and kind != now[section]["kind"]:
            options.append(f"{section}={kind}")
    return options


def _schemas(kinds: Mapping[str, Mapping[str, str]]) -> list[str]:
    """What brings the defaults of these kinds; those of the first ones are there."""
    options = list[str]()
    for section, of in kinds.items():
        if of["kind"] != next(iter(KINDS[section])):
            options.append(f"schema/{section}@{section}={of['kind']}")
    return options


def _refused(text: str, error: Exception, there_are: Mapping[str, Mapping[str, str]]) -> str:
    """One line for an override that Hydra does not take."""
    group, _, option = text.lstrip("+~").partition("=")
    if text.startswith("~") and "does not exist" in str(error) and group in keys():
        return f"{text}: no file sets it, so it has its default already: leave this out"
    if group not in there_are or option in there_are[group]:
        return f"{text}: {first_line(error)}"
    close = get_close_matches(option, there_are[group], n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{text}: there is no such {group}{hint}; there are {', '.join(there_are[group])}"


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


def _kinds(composed: DictConfig) -> dict[str, dict[str, str]]:
    """The `kind` of model and data, which choose the schemas. Other values may not be resolvable yet."""
    kinds: dict[str, dict[str, str]] = {}
    for section in KINDS:
        held: Any = None
        with suppress(OmegaConfBaseException):
            found = composed[section]
            held = {"kind": found.kind} if isinstance(found, DictConfig) else None
        kinds[section] = {"kind": kind_of(section, held)}
    return kinds


def first_line(error: BaseException) -> str:
    """Hydra's own words, without the frames and keys that it adds below them."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else first_line(error.__cause__) if error.__cause__ else type(error).__name__


def follows_of(composed: DictConfig) -> dict[str, list[str]]:
    """For each key that takes its value from others (`${…}`), those others."""
    out: dict[str, list[str]] = {}
    for key in keys(_kinds(composed)):
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
    if NOT_SET in failed.get("data.path", "") and (missing := KINDS["data"][_kinds(composed)["data"]["kind"]].missing):
        failed["data.path"] = f"data.path{NOT_SET}{missing}"
    told = list[str]()
    for name, problem in failed.items():
        follows_a_failed_one = not failed.keys().isdisjoint(follows.get(name, ()))
        # In a cycle every key depends on a failed one; report them all, or none would be reported.
        if "Recursive" in problem or not follows_a_failed_one:
            told.append(problem)
    return raw, told
