"""From the command line to a Config. Hydra reads the grammar of overrides and composes the files; overrides of keys are
applied here, so that every mistake is listed at once, and the schema fills in what no file says.

`@hydra.main` is not used: it stops at the first bad override with exit code 1, and makes a folder per process.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from pydantic.fields import FieldInfo

from mingpt.config import moment
from mingpt.config.commandline import CommandLine
from mingpt.config.groups import Groups, groups, offer
from mingpt.config.keys import FOLLOWED, KINDS, complete, keys, kind_of, schemas, takes_any, value_of
from mingpt.config.names import unknown
from mingpt.config.schema import Config
from mingpt.config.section import MISSING
from mingpt.config.validation import shown, validate
from mingpt.console import say
from mingpt.errors import UserError
from mingpt.gone import instead
from mingpt.redact import without_secrets


def configure(arguments: Sequence[str], world_size: int = 1, trains: bool = True) -> Config | None:
    """The validated config of a command line; None if it asked for --help, --cfg or --info, answered on stdout.

    trains: whether it is this Python that will train, and so must have the trackers' packages.

    Raises errors.UserError with every problem in it.
    """
    line = CommandLine.of(arguments)
    if line.help:
        from mingpt.config.help import help_text

        say(help_text(line.folders))
        return None
    composed, problems = composed_of(line)
    follows = follows_of(composed)
    raw, unresolved = resolved(composed, follows)
    if (line.cfg or line.info) and not problems:
        if line.resolve and unresolved:
            raise UserError(*unresolved)
        if line.info:
            from mingpt.config.help import info

            info(line)
        else:
            plain = without_secrets(OmegaConf.to_container(composed, resolve=line.resolve))
            say(OmegaConf.to_yaml(OmegaConf.create(plain)).rstrip("\n"))
        return None
    return validate(
        raw,
        world_size,
        also=(*problems, *unresolved),
        follows=follows,
        typed=_typed(line),
        places=any("Missing mandatory" in text for text in unresolved),
        trains=trains,
    )


def refuse_the_time(arguments: Sequence[str]) -> None:
    """Raise UserError if values of the config follow the clock (`${now:…}`), for a run of several starts."""
    if not moment.was_asked():
        return
    found: list[dict[str, Any]] = []
    for when in moment.TWO:
        with moment.at(when):
            composed, _ = composed_of(CommandLine.of(arguments))
            found.append(resolved(composed, follows_of(composed))[0])
    known = keys(_kinds(composed))
    if changed := [key for key in known if value_of(key, found[0]) != value_of(key, found[1])]:
        raise UserError(
            f"{', '.join(changed)}: ${{now:…}} is another time in each process and at each restart, which would begin "
            f"another run: write the value out, or take one that stays, such as ${{oc.env:SLURM_JOB_ID}}"
        )


def as_yaml(config: Config) -> str:
    """The resolved config for people, without secrets."""
    return OmegaConf.to_yaml(OmegaConf.create(without_secrets(config.model_dump())))


def composed_of(line: CommandLine) -> tuple[DictConfig, list[str]]:
    """Compose the files and apply the overrides. Returns those that can't be applied as problems."""
    problems = list(line.problems)
    there_are = groups(line.folders)
    offer(line.folders)
    chosen = [o for o in line.overrides if o.key_or_group in there_are]
    values = [o for o in line.overrides if o.key_or_group not in there_are]
    with initialize_config_dir(str(line.main), version_base="1.3"):
        moment.register()
        good, composed = _choose(line.config_name, line.for_hydra, chosen, there_are, problems)
        # `data.kind=shards` brings that kind's option in place of the one that the files name, as `data=shards` does.
        now, groups_chosen = _kinds(composed), {o.key_or_group for o in chosen}
        kinds = {s: kind for s in KINDS if s not in groups_chosen and (kind := _wanted(s, values))}
        if more := [f"{s}={kind}" for s, kind in kinds.items() if kind != now[s]["kind"]]:
            with suppress(Exception):  # a defaults list of one's own without the group: then no file names a kind
                composed = compose(line.config_name, [*more, *good])
    named_first = sorted(values, key=lambda o: o.key_or_group not in {f"{s}.kind" for s in KINDS})
    problems += [problem for o in named_first if (problem := _apply(composed, o))]
    return _filled(composed), problems


def _choose(
    name: str, first: list[str], chosen: Sequence[Override], there_are: Groups, problems: list[str]
) -> tuple[list[str], DictConfig]:
    """Compose the files that the groups' overrides choose; returns those that Hydra takes, and what comes out."""
    good = [*first, *(str(o.input_line) for o in chosen)]
    try:
        return good, compose(name, good)
    except Exception:  # Hydra has errors of its own for most slips, and ValueError or TypeError for others
        good = [*first]
    try:
        composed = compose(name, good)
    except Exception as error:
        raise UserError(*problems, f"--config-name={without_secrets(name)}: {_first_line(error)}") from error
    for override in chosen:
        text = str(override.input_line)
        try:
            composed = compose(name, [*good, text])
            good.append(text)
        except Exception as error:  # adding them one by one finds each bad one
            problems.append(_not_chosen(override, error, there_are))
    return good, composed


def _not_chosen(override: Override, error: Exception, there_are: Groups) -> str:
    """One line for a group's override that Hydra refuses."""
    group, value, text = override.key_or_group, override.value(), without_secrets(override.input_line)
    if not isinstance(value, str):
        return f"{text}: {group} takes one of {', '.join(there_are[group])}"
    if cure := instead(f"{group}={value}"):
        return cure
    if value not in there_are[group]:
        close = get_close_matches(value, there_are[group], n=1)
        return (
            f"{text}: there is no {group} {without_secrets(value)!r}{f' (did you mean {close[0]}?)' if close else ''}; "
            f"there are {', '.join(there_are[group])}"
        )
    if override.is_add():
        return f"{text}: {group} has a default already: write {group}={value} without the +"
    return f"{text}: {_first_line(error)}"


def _typed(line: CommandLine) -> set[str]:
    """The keys of sections that the command line names, `section={key: …}` too."""
    given = [(o.key_or_group, o.value()) for o in line.overrides]
    names = [f"{key}.{name}" for key, value in given for name in (value if isinstance(value, dict) else [""])]
    return {".".join(name.split(".")[:2]) for name in names}


def _wanted(section: str, values: Sequence[Override]) -> str | None:
    """The kind of a section that the keys of a command line name; `_target_` is one's own."""
    given = {o.key_or_group: o.value() for o in values}
    kind = given.get(f"{section}.kind", "own" if f"{section}._target_" in given else None)
    return kind if isinstance(kind, str) and kind in KINDS[section] else None


def _apply(composed: DictConfig, override: Override) -> str | None:
    """Set, add or delete a key as an override says; returns what is wrong with that, or None."""
    key, value, text = override.key_or_group, override.value(), without_secrets(override.input_line)
    section, _, rest = key.partition(".")
    kinds = _kinds(composed)
    sections = schemas(kinds)
    top = f"{section}.{rest.partition('.')[0]}" if rest and section in sections else key
    own = section in KINDS and takes_any(section, kinds[section]["kind"])
    if not key or override.package is not None:
        return f"{text!r} has no key" if not key else f"{text}: there is no group {key!r}"
    known, said = top in keys(kinds) or top in sections, _said(composed, key)
    if not known and (said is None if override.is_delete() else not own):  # a file may hold a key of another kind
        return unknown(top, kinds)
    try:
        if override.is_delete():
            if value is not None and value != (held := OmegaConf.select(_filled(composed), key)):
                return f"{text}: Could not delete from config. The value of '{key}' is {shown(key, held)}."
            above, _, leaf = key.rpartition(".")
            parent = OmegaConf.select(composed, above) if above else composed
            if isinstance(parent, DictConfig):
                with open_dict(parent):
                    parent[leaf] = None  # pop resolves what it takes out
                    parent.pop(leaf)
        elif override.is_add() and _is_value(said, key, kinds) and not isinstance(value, (dict, list)):
            return f"{text}: Could not append to config. An item is already at '{key}'."
        else:
            OmegaConf.update(composed, key, value, merge=True, force_add=True)
    except Exception as error:
        return f"{text}: {_first_line(error)}"
    return None


def _said(composed: DictConfig, key: str) -> Any:
    """What the files and overrides hold for a key, not resolved: it may follow a key that only the schema has."""
    held: Any = OmegaConf.to_container(composed, resolve=False)
    for name in key.split("."):
        held = held.get(name) if isinstance(held, dict) else None
    return held


def _is_value(said: Any, key: str, kinds: dict[str, dict[str, str]]) -> bool:
    """Whether a key has a value, of the files or of the schema, whose `""` and `???` are none."""
    held = value_of(key, kinds) if said is None and key in keys(kinds) else said
    return held is not None and held not in ("", MISSING)


def _filled(composed: DictConfig) -> DictConfig:
    """Add the schema's default for every key that neither a file nor an override sets."""
    raw = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(raw, dict)
    sections, out = schemas(_kinds(composed)), dict[Any, Any]()
    for name, field in Config.model_fields.items():
        held = raw.get(name, {} if name in sections else field.get_default())
        if name in sections and isinstance(held, dict):
            held = complete(sections[name], held, FieldInfo.get_default)
        out[name] = held
    return OmegaConf.create(out | {k: v for k, v in raw.items() if k not in out})


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


def _first_line(error: BaseException) -> str:
    """Hydra's own words, without the frames and keys that it adds below them."""
    lines = without_secrets(str(error).strip()).splitlines()
    return lines[0] if lines else _first_line(error.__cause__) if error.__cause__ else type(error).__name__


def follows_of(composed: DictConfig) -> dict[str, list[str]]:
    """For each key that takes its value from others (`${…}`), those others."""
    out: dict[str, list[str]] = {}
    for key in keys(_kinds(composed)):
        section, _, name = key.rpartition(".")
        holder = composed[section] if section else composed
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
            except OmegaConfBaseException as error:
                failed[name] = f"{name}: {_first_line(error)}"
        return out

    raw = plain(composed, "")
    if "Missing" in failed.get("data.path", ""):
        kind = KINDS["data"][_kinds(composed)["data"]["kind"]]
        failed["data.path"] += f": {kind.missing}" if kind.missing else ""
    # In a cycle every key depends on a failed one; report them all, or none would be reported.
    told = [t for name, t in failed.items() if "Recursive" in t or not failed.keys() & set(follows.get(name, ()))]
    return raw, told
