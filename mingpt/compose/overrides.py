"""What Hydra composes of the files and overrides of a command line.

All at once, and if that fails one by one, to find which are wrong.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from difflib import get_close_matches
from functools import lru_cache
from typing import Any
from warnings import catch_warnings, filterwarnings

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mingpt.compose import resolvers
from mingpt.compose.commandline import FIRST, CommandLine
from mingpt.compose.groups import Places, defaults, groups, offer
from mingpt.config.keys import KINDS, keys, kind_of
from mingpt.errors import UserError

Composed = tuple[list[str], DictConfig, list[str]]  # overrides that Hydra takes, what it makes of them, problems


@contextmanager
def hydra_of(line: CommandLine) -> Iterator[None]:
    """hydra.compose looks where the command line says. A place that is not there is an error."""
    offer(line.folders)
    Places.folder = line.options.config_dir
    try:
        with hydra.initialize_config_dir(line.main, version_base="1.3"), catch_warnings():
            filterwarnings("error", "provider=.* is not available")
            resolvers.take_now()
            yield
    finally:
        Places.folder = None


def composed_of(line: CommandLine) -> Composed:
    """The overrides that Hydra takes, what it composes of them, and a problem for each other one."""
    with hydra_of(line):
        good, composed, problems = _at_once(line) or _one_by_one(line)
    # What is not there, or was deleted, has the schema's default, which other keys may refer to.
    whole = OmegaConf.merge(defaults(chosen_kinds(composed)), composed)
    assert isinstance(whole, DictConfig)
    return good, whole, [*line.problems, *problems]


def _at_once(line: CommandLine) -> Composed | None:
    """What Hydra composes of all overrides, with the schemas of the kinds that come out; None if something is wrong.

    Hydra takes 0.2 CPU seconds for the files, and this asks it once or twice.
    """
    chosen, values = line.for_hydra
    named = {o.key_or_group: str(o.value()) for o in line.overrides}
    if any(f"{section}.{key}" in named for section in KINDS for key in ("kind", "_target_")):
        return None
    kinds = dict[str, dict[str, str]]()
    for section in KINDS:
        kinds[section] = {"kind": kind_of(section, {"kind": named.get(section)})}
    for _ in range(2):
        good = [*_schemas(kinds), *chosen]
        try:
            composed = _with(_of_files(line, good), values)
        except Exception:  # _one_by_one() finds which override it is
            return None
        before, kinds = kinds, chosen_kinds(composed)
        if kinds == before:
            return [*good, *values], composed, []
    return None


def _one_by_one(line: CommandLine) -> Composed:
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
    for find in (_implied, lambda _, composed: _schemas(chosen_kinds(composed))):
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
    values = {o.key_or_group: o.value() for o in line.overrides if not o.is_delete()}
    now = chosen_kinds(composed)
    options = list[str]()
    for section, kinds in KINDS.items():
        if section in values:
            continue
        kind = values.get(f"{section}.kind", "own" if f"{section}._target_" in values else None)
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


def chosen_kinds(composed: DictConfig) -> dict[str, dict[str, str]]:
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
