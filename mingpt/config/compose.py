"""From the command line to a Config: Hydra's override grammar through its Compose API, every mistake listed at once.

`@hydra.main` is not used: it stops at the first bad override with exit code 1, and makes a folder per process.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import mingpt
from mingpt.command import program
from mingpt.config import moment
from mingpt.config.schema import Config, Section
from mingpt.config.trusted import problems_of_places, problems_of_size
from mingpt.config.validation import KINDS, choices, keys, kind_of, named, schemas, takes_any, unknown, validate
from mingpt.console import complain, say
from mingpt.errors import USER_ERROR, UserError
from mingpt.redact import without_secrets

# What may be set for a program that works on a snapshot and does not train.
HEEDED = ("data", "world", "precision", "batch.micro_size", "train.threads")
UNUSED = re.compile(r"[+~]*hydra\.(?!searchpath\b)")  # settings of Hydra's own programs


def config_dir() -> Path:
    """configs/: inside an installed wheel, or beside the package in a checkout."""
    package = Path(mingpt.__file__).resolve().parent
    return next(p for p in (package / "configs", package.parent / "configs") if p.is_dir())


class Parser(argparse.ArgumentParser):
    """argparse with our exit code for a mistake."""

    def error(self, message: str) -> NoReturn:
        complain(f"error: {without_secrets(message)}; see --help")
        sys.exit(USER_ERROR)


def parser() -> Parser:
    """The options of `mingpt train`."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true", help="list every group and key")
    parser.add_argument("--cfg", choices=["job"], help="print the config and stop")
    parser.add_argument("--resolve", action="store_true", help="with --cfg: print values in place of ${…}")
    parser.add_argument("overrides", nargs="*")
    return parser


def configure(arguments: Sequence[str], world_size: int = 1) -> Config | None:
    """The validated config of a command line; None if it asked for --help or --cfg, which are answered on stdout.

    Raises errors.UserError with every problem in it.
    """
    options = parser().parse_intermixed_args(arguments)
    if options.help:
        say(help_text())
        return None
    composed, problems = _compose(options.overrides)
    if options.cfg and not problems:
        if options.resolve and (unresolved := _resolve(composed, _follows(composed))[1]):
            raise UserError(*unresolved)
        shown = without_secrets(OmegaConf.to_container(composed, resolve=options.resolve))
        say(OmegaConf.to_yaml(OmegaConf.create(shown)).rstrip("\n"))
        return None
    follows = _follows(composed)
    raw, unresolved = _resolve(composed, follows)
    unused = [f"{_shown(text)}: not used here: set run.dir=…" for text in options.overrides if UNUSED.match(text)]
    return validate(
        raw,
        world_size,
        also=(*problems, *unused, *unresolved),
        follows=follows,
        places=any("Missing mandatory" in text for text in unresolved),
    )


def refuse_the_time(overrides: Sequence[str]) -> None:
    """Raise UserError if values of the config follow the clock (`${now:…}`), for a run of several starts."""
    if not moment.was_asked():
        return
    found: list[dict[str, Any]] = []
    for when in moment.TWO:
        with moment.at(when):
            composed, _ = _compose(overrides)
            found.append(_resolve(composed, _follows(composed))[0])
    known = keys(_kinds(composed))
    if changed := [key for key in known if _value(found[0], key) != _value(found[1], key)]:
        raise UserError(
            f"{', '.join(changed)}: ${{now:…}} is another time in each process and at each restart, which would begin "
            f"another run: write the value out, or take one that stays, such as ${{oc.env:SLURM_JOB_ID}}"
        )


def _value(raw: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.rpartition(".")
    holder = raw.get(section, {}) if section else raw
    return holder.get(name) if isinstance(holder, Mapping) else None


def reconfigure(stored: Mapping[str, Any], overrides: Sequence[str], world_size: int) -> Config:
    """A snapshot's config with a command line's overrides of HEEDED keys over it, for a program that does not train.

    The stored config may be a stranger's. It never meets Hydra, which would resolve what is written in it. Where caches
    are, how large, and how many processes there are is not its to say, nor where data is, unless that is a plain place
    (trusted.py). Code that it names is not imported: that of a model is refused, and that of data must be
    named on the command line. Raises UserError with every problem.
    """
    model = stored.get("model")
    if takes_any("model", kind_of("model", model)):
        raise UserError("a model of one's own is never imported because a snapshot names it: evaluate it in a program")
    given: list[str] = []
    for text in overrides:
        with suppress(Exception):  # told by _compose
            given.append(OverridesParser.create().parse_override(text).key_or_group)
    data = stored.get("data")
    data = data if isinstance(data, dict) and not {"data", "data.kind", "data._target_"} & set(given) else None
    if data is not None and takes_any("data", kind_of("data", data)):
        raise UserError("data of one's own is never imported because a snapshot names it: give data._target_=… again")
    composed, problems = _compose(overrides if data is None else [f"data={kind_of('data', data)}", *overrides])
    if unheeded := [key for key in given if key not in HEEDED and key.partition(".")[0] not in HEEDED]:
        problems = [f"{key} can't be set here, only {', '.join(HEEDED)}" for key in unheeded]
    follows = _follows(composed)
    raw, unresolved = _resolve(composed, follows)
    own_place = ("workers", "cache_dir", "cache_timeout_seconds", "cache_bytes")
    kept = {k: v for k, v in (data or {}).items() if k not in own_place and f"data.{k}" not in given}
    for key, value in kept.items():
        problems += [f"data.{key} {problem}: give data.{key}=…" for problem in problems_of_places(value)]
    problems += [text for text in unresolved if text.partition(":")[0] not in {f"data.{k}" for k in kept}]
    raw["data"] |= kept
    raw["model"] = model
    for section, name in (("", "precision"), ("batch", "micro_size"), ("train", "threads")):
        before, now = (stored.get(section), raw[section]) if section else (stored, raw)
        key = f"{section}.{name}".lstrip(".")
        if key not in given and isinstance(before, Mapping) and name in before:
            now[name] = before[name]  # bits follow from it
            problems += problems_of_size(key, now[name])
    raw["batch"] = {"micro_size": raw["batch"]["micro_size"]}
    if isinstance(raw["batch"]["micro_size"], int):  # a step, which there is none of, must fit the world
        raw["batch"]["global_size"] = raw["batch"]["micro_size"] * world_size
    return validate(raw, world_size, also=problems, follows=follows)


def as_yaml(config: Config) -> str:
    """The resolved config for people, without secrets."""
    return OmegaConf.to_yaml(OmegaConf.create(without_secrets(config.model_dump())))


def _compose(overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Compose train.yaml with the overrides; those that Hydra refuses are left out and told as problems."""
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        moment.register()
        overrides = _with_groups(overrides)
        try:
            return _filled(compose("train", list(overrides))), []
        except Exception:  # Hydra has errors of its own for most slips, and ValueError or TypeError for others
            pass
        # Hydra stops at the first problem. Adding the overrides one by one finds each bad one; groups come first,
        # because the keys that exist depend on them.
        problems: list[str] = []
        parsed: list[tuple[bool, str, Override]] = []
        for text in overrides:
            try:
                override = OverridesParser.create().parse_override(text)
                parsed.append((not _is_group(override.key_or_group), text, override))
            except Exception:
                quotes = "; a value with marks such as = in it stands in quotes of its own: key='a=b'"
                problems.append(
                    f"{_shown(text)!r} is not an override: write key=value, group=option, +key=value or ~key"
                    f"{quotes if re.match(r'[+~]*[a-z_.]+=', text) else ''}"
                )
        good: list[str] = []
        for _, text, override in sorted(parsed, key=lambda item: item[0]):
            try:
                compose("train", [*good, text])
                good.append(text)
            except Exception as error:
                problems.append(_refused(_shown(text), override, error, compose("train", good)))
        return _filled(compose("train", good)), problems


def _with_groups(overrides: Sequence[str]) -> list[str]:
    """`data.kind=shards` brings that kind's keys with it, as `data=shards` does, unless the keys are there already.

    So does `model._target_=…`; the keys that its code takes are not known to any group, and need no + all the same.
    """
    parsed: dict[str, Override] = {}
    for text in overrides:
        with suppress(Exception):  # told later
            override = OverridesParser.create().parse_override(text)
            parsed[override.key_or_group] = override
    groups_alone = [o.input_line for o in parsed.values() if _is_group(o.key_or_group) and o.input_line]
    out = list(overrides)
    for section in KINDS:
        mine = {key: o for key, o in parsed.items() if key.startswith(f"{section}.")}
        wanted: object = "own" if f"{section}._target_" in mine else None
        if f"{section}.kind" in mine:
            wanted = mine[f"{section}.kind"].value()
        if not mine:
            continue
        kind = None
        with suppress(Exception):
            kind = compose("train", groups_alone)[section].kind
        if wanted in list(KINDS[section]) and section not in parsed and kind not in (None, wanted):
            out.insert(0, f"{section}={wanted}")
            kind = wanted
        if kind in list(KINDS[section]) and takes_any(section, kind):
            known = keys({section: {"kind": kind}})
            arguments = [o.input_line for k, o in mine.items() if o.type == OverrideType.CHANGE and k not in known]
            out = [f"++{text}" if text in arguments else text for text in out]
    return out


def _shown(override: str) -> str:
    """An override for the eye. What Hydra refuses is often a URL whose `?` is not in quotes."""
    return str(without_secrets(override))


def _filled(composed: DictConfig) -> DictConfig:
    """With the schema's defaults for keys that the command line deleted (`~key`); other keys may follow them."""
    own = schemas(_kinds(composed))
    for section in own:
        if section not in list(composed):
            OmegaConf.update(composed, section, {}, force_add=True)
    of_section: dict[str, type[Section]] = {"": Config, **own}
    for section, schema in of_section.items():
        holder = composed[section] if section else composed
        for name, field in named(schema).items():
            if name not in own and isinstance(holder, DictConfig) and name not in list(holder):
                OmegaConf.update(composed, f"{section}.{name}".lstrip("."), field.default, force_add=True)
    return composed


def _kinds(composed: DictConfig) -> dict[str, Any]:
    """As much of a plain config as tells of which kinds its sections are; it may not be resolvable yet."""
    kinds: dict[str, Any] = {}
    for section in KINDS:
        with suppress(OmegaConfBaseException):
            kinds[section] = {"kind": composed[section].kind}
    return kinds


def groups() -> dict[str, dict[str, str]]:
    """Each group's options, with the first comment line of each one's file."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted(config_dir().glob("*/*.yaml")):
        comment = next((line[1:].strip() for line in file.read_text().splitlines() if re.match("# [^@]", line)), "")
        found.setdefault(file.parent.name, {})[file.stem] = comment
    return found


def _is_group(key: str) -> bool:
    return key in groups()


def _refused(text: str, override: Override, error: Exception, composed: DictConfig) -> str:
    """One line for an override that Hydra did not add to what is composed so far."""
    key, value = override.key_or_group, override.value()
    if _is_group(key):
        options = groups()[key]
        if not isinstance(value, str):
            return f"{text}: {key} takes one of {', '.join(options)}"
        if value not in options:
            return f"{text}: there is no {key} {without_secrets(value)!r}; there are {', '.join(options)}"
        if override.is_add():
            return f"{text}: {key} has a default already: write {key}={value} without the +"
    elif key not in keys(_kinds(composed)) and not override.is_add():
        return unknown(key, _kinds(composed)) if key else f"{text!r} has no key"
    return f"{text}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    """Hydra's own words, without the frames and keys that it adds below them."""
    lines = without_secrets(str(error).strip()).splitlines()
    return lines[0] if lines else _first_line(error.__cause__) if error.__cause__ else type(error).__name__


def _follows(composed: DictConfig) -> dict[str, list[str]]:
    """For each key that takes its value from others (`${…}`), those others."""
    out: dict[str, list[str]] = {}
    for key in keys(_kinds(composed)):
        section, _, name = key.rpartition(".")
        holder = composed[section] if section else composed
        if isinstance(holder, DictConfig) and OmegaConf.is_interpolation(holder, name):
            raw = OmegaConf.to_container(holder, resolve=False)
            assert isinstance(raw, dict)
            out[key] = re.findall(r"\$\{([\w.]+)\}", str(raw[name]))
    return out


def _resolve(composed: DictConfig, follows: Mapping[str, Sequence[str]]) -> tuple[dict[str, Any], list[str]]:
    """The plain dict with interpolations resolved; one problem for each that can't be, told where it begins."""
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
    # In a circle each key follows another that failed: those are all told, or none would be.
    told = [t for name, t in failed.items() if "Recursive" in t or not failed.keys() & set(follows.get(name, ()))]
    return raw, told


def help_text() -> str:
    lines = [
        f"{program('mingpt.train')} [--cfg job [--resolve]] [override ...]",
        "",
        "Overrides have Hydra's grammar: key=value, group=option, +new=value, ~gone.",
        "",
        "Groups (group=option):",
    ]
    for group, options in groups().items():
        lines += [f"  {group}/", *(f"    {option:<16} {comment}" for option, comment in options.items())]
    lines += ["", "Keys (key=value):"]
    several = tuple(f"{section}." for section in KINDS)
    lines += [_help_line(key, text) for key, text in keys().items() if not key.startswith(several)]
    for section, kinds in KINDS.items():
        of_kind = {kind: _section_keys(section, kind) for kind in kinds}
        common = set.intersection(*(set(of.items()) for of in of_kind.values()))
        any_kind = _section_keys(section, next(iter(kinds)))
        lines += ["", f"Keys of {section}, whatever its kind:"]
        lines += [_help_line(key, text) for key, text in any_kind.items() if (key, text) in common]
        for kind, of in of_kind.items():
            what = KINDS[section][kind].model_fields["kind"].description
            lines += ["", f"Keys of {section}.kind={kind} ({what}):"]
            lines += [_help_line(key, text) for key, text in of.items() if (key, text) not in common]
    return "\n".join(lines)


def _section_keys(section: str, kind: str) -> dict[str, str]:
    return {k: text for k, text in keys({section: {"kind": kind}}).items() if k.startswith(f"{section}.")}


def _help_line(key: str, text: str) -> str:
    words = choices(key)
    takes = f" [{' | '.join(words)}]" if all(isinstance(w, str) for w in words) and words else ""
    return f"  {key:<28} {text}{takes}"
