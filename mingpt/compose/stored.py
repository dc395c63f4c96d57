"""The one way to take a config that a run has stored. It may be a stranger's: it chooses no code, places or programs.

What is written in it is not resolved, and no code that it names is imported. A command line lies over it, and it is
validated as a command line is. Raises UserError with every problem.
"""

import os
import re
from collections.abc import Callable, Container, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore

from mingpt.cli.command import quoted
from mingpt.cli.console import printable
from mingpt.compose.commandline import FIRST, CommandLine
from mingpt.compose.compose import configure
from mingpt.compose.groups import groups
from mingpt.config.affecting import settings
from mingpt.config.configfile import lacks_secret
from mingpt.config.keys import KINDS, Raw, choices, keys, kind_of, leaves, value_of
from mingpt.config.schema import Config
from mingpt.errors import UserError

NAME = "stored-config"  # of the file that the command line is laid over
OF_EACH_RUN = ("run.name", "run.dir", "snapshot.dir", "resume")
OWN_PLACE = ("workers", "cache_dir", "cache_timeout_seconds", "cache_bytes")  # of data: this machine's own to say

# What may be set for a program that works on a snapshot and does not train; for one that computes a step again.
EVALUATION = ("data", "world", "precision", "batch.micro_size", "train.threads")
REPLAY = ("data", "world", "model._target_", "optimizer._target_", "schedule._target_")
# What the steps of a run follow from, besides what affects the result.
SECTIONS = ("model", "data", "batch", "optimizer", "schedule", "seed", "reduce", "precision")
OF_STEPS = (*SECTIONS, "train.max_steps", "health.max_skips")

# What a stored config may say of the place of its data. No web address: that could be one of this machine's own
# network, such as a cloud's metadata server. And the most that it may say of what costs memory and processors.
BUCKETS = ("s3", "gs", "gcs", "az", "abfs")
MOST = {"batch.micro_size": 256, "train.threads": 64}


def fork_config(
    stored: Raw, overrides: Sequence[str], name: str, run_dir: str, source: str, trust: bool
) -> tuple[Config, dict[str, Any]]:
    """What a fork in run_dir trains with, and the places that it has from the stored config, by key.

    A key that the command line does not name keeps its value, also where a default would follow another key.
    source: the run's directory. trust: it is the user's own run: its places stay.
    """
    arguments = [f"run.name={quoted(name)}", f"run.dir={quoted(run_dir)}", *overrides]

    def wanted(key: str) -> bool:
        return not is_below(key, OF_EACH_RUN) and (trust or not is_own_place(key))

    values, problems = _taken(stored, arguments, wanted, source, trust)
    config = _composed(values, arguments, problems)
    return config, {key: value for key, value in values.items() if _is_place(key, value) and not is_own_place(key)}


def replay_config(stored: Raw, source: str, here: Sequence[str] = (), changed: Sequence[str] = ()) -> Config:
    """What steps follow from, for computing them again; all else is left to the defaults.

    source: the run's directory. here: overrides for this machine, such as data.path=…; none may affect the result.
    changed: settings that may.
    """
    before, affecting = settings(stored)

    def wanted(key: str) -> bool:
        return _of_weights(key) and (is_below(key, OF_STEPS) or key in affecting)

    values, problems = _taken(stored, [*here, *changed], wanted, source)
    new = _named(changed)
    problems += _elsewhere(here, REPLAY)
    for key in new:
        if key.partition(".")[0] == "data":
            problems.append(f"--set {key}: the samples of a step are those of the run: fork the run for other data")
    config = _composed(values, [*here, *changed], problems)
    after, affecting = settings(config.model_dump())
    problems, for_this_machine = [], _named(here)
    for key in sorted(affecting):
        if after[key] != before.get(key) and is_below(key, for_this_machine):
            was = before.get(key)
            problems.append(f"{key}={after[key]} would affect the result, and the run had {was}: leave it out")
    for key in new:
        if not any(is_below(name, [key]) for name in affecting):
            problems.append(f"--set {key}: this key does not affect the result: leave it out")
    if problems:
        raise UserError(*problems)
    return config


def evaluation_config(stored: Raw, source: str, arguments: Sequence[str], world_size: int) -> Config:
    """A snapshot's config for a program that does not train. source: the run's directory."""
    if kind_of("model", stored.get("model")) == "own":
        raise UserError(
            "a model of one's own is never imported because a snapshot names it: train.eval_every=… measures it, and "
            "`mingpt replay RUN@STEP model._target_=… data._target_=…` computes a step of it"
        )
    kept = ("model", "data", "precision", "batch.micro_size", "train.threads")
    values, problems = _taken(stored, arguments, lambda key: _of_weights(key) and is_below(key, kept), source)
    problems += _elsewhere(arguments, EVALUATION)
    for key, most in MOST.items():
        if isinstance(values.get(key), int) and values[key] > most:
            problems.append(
                f"{key}={values[key]} in the snapshot's config: more than {most} is not taken from a snapshot, which "
                f"may be a stranger's: give {key}=…"
            )
    size = values.get("batch.micro_size", _named(arguments).get("batch.micro_size"))
    if isinstance(size, int):
        # validate() wants global_size to fit the world; nothing trains here.
        values["batch.global_size"] = size * world_size
    return _composed(values, arguments, problems, world_size)


def problems_of_places(value: object, source: str) -> list[str]:
    """What keeps the texts in a stored value from being taken for places. source: the run's directory."""
    return [problem for text in _texts(value) if (problem := _problem_of_place(text, source))]


def _problem_of_place(text: str, source: str) -> str | None:
    scheme, separator, _ = text.partition("://")
    if separator and lacks_secret(text):
        return "has a secret in its URL, and snapshots keep no secrets"
    shown = f"is {text!r} in the snapshot's config, which may be a stranger's"
    if "::" in text or not text.isprintable():
        return f"{shown}: chained URLs and control characters are not taken from there"
    if separator and scheme not in BUCKETS:
        return f"{shown}: of URLs, only those of buckets ({', '.join(BUCKETS)}) are taken from there"
    if not separator and (re.match("[/~\\\\]|[A-Za-z0-9+.-]*:", text) or ".." in re.split(r"[/\\]", text)):
        return f"{shown}: of paths, only those below the working directory are taken from there"
    if is_within(text, source):
        return f"{shown}: nothing in the run's own directory is taken from there"
    return None


def is_below(key: str, names: Container[str]) -> bool:
    """Whether a key, or a section that it is in, is among `names`."""
    parts = key.split(".")
    return any(".".join(parts[:n]) in names for n in range(1, len(parts) + 1))


def is_own_place(key: str) -> bool:
    return key.startswith("data.") and key.rpartition(".")[2] in OWN_PLACE


def _taken(
    stored: Raw,
    arguments: Sequence[str],
    wanted: Callable[[str], bool],
    source: str,
    trust: bool | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """The stored values that stand below a command line, by key, and what is wrong with others.

    trust: whether its places are taken; None: that can't be asked for.
    """
    names, values, problems = _named(arguments), dict[str, Any](), list[str]()
    replaced = {*names}
    for section in KINDS:
        own_code = kind_of(section, stored.get(section)) == "own"
        # Of another kind, or code of the user's own in place of a kind: the stored keys are none of its.
        if f"{section}.kind" in names or (f"{section}._target_" in names and not own_code):
            replaced.add(section)
    for key, value in leaves(stored):
        # No other sections: Hydra would heed one of its own.
        if key.partition(".")[0] not in Config.model_fields or is_below(key, replaced) or not wanted(key):
            continue
        values[key] = value
        cure = f"give {printable(key)}=…"
        if problem := _unresolved(key, value):
            problems.append(f"{printable(key)} {problem}: {cure}")
        elif not trust and _is_place(key, value):
            cure += "" if trust is None else ", or --trust if the run is your own"
            problems += [f"{printable(key)} {problem}: {cure}" for problem in _problems(key, value, source)]
    return values, problems


def _unresolved(key: str, value: object) -> str | None:
    if value and (key.rpartition(".")[2] == "_target_" or key == "observers"):
        return "names code of one's own, which is never imported because a snapshot names it"
    if "${" in key or "${" in str(value):
        return "holds ${…} in the snapshot's config, which is not resolved from there"
    return None


def _problems(key: str, value: object, source: str) -> list[str]:
    """What keeps a value that may be a place from being taken."""
    if key.partition(".")[0] in KINDS or key in settings({})[1]:
        return problems_of_places(value, source)
    return [f"is {value!r} in the snapshot's config, which may be a stranger's"]


def _is_place(key: str, value: object) -> bool:
    """Whether a value may name a place or a program: a text that is none of the schema's words, or a list of names."""
    words, own = set(_texts(value)), key.partition(".")[0] not in KINDS
    secret = lacks_secret(value) and "://" not in str(value)
    if not words or secret or (own and (key not in keys() or value == value_of(key, {}))):
        return False
    return not words <= set(choices(key)) or (own and isinstance(value, list))


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    texts = list[str]()
    if isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            texts += _texts(inner)
    return texts


def is_within(place: str, folder: str) -> bool:
    """Whether a path or URL is a folder's, or one below it."""
    return "::" not in place and f"{_absolute(place)}/".startswith(f"{_absolute(folder)}/")


def _absolute(place: str) -> str:
    return place.rstrip("/") if "://" in place else os.path.realpath(place)


def _named(arguments: Sequence[str]) -> dict[str, Any]:
    return {override.key_or_group: override.value() for override in CommandLine.of(arguments).overrides}


def _of_weights(key: str) -> bool:
    """Whether a program that takes its weights from a snapshot needs this key of its config."""
    return not is_own_place(key) and key != "model.init_from"


def _elsewhere(arguments: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """A problem for each argument that is not this program's."""
    names = [printable(key) for key in sorted(_named(arguments)) if not is_below(key, allowed)]
    if CommandLine.of(arguments).name != FIRST:
        names.append("--config-name")
    return [f"{name} can't be set here, only {', '.join(allowed)}" for name in names]


def _composed(values: Raw, arguments: Sequence[str], problems: Sequence[str], world_size: int = 1) -> Config:
    """The command line, laid over stored values. problems: raised before code that the command line names runs."""
    if problems:
        raise UserError(*problems)
    plain: dict[str, Any] = {}
    for key, value in values.items():
        *above, leaf = key.split(".")
        holder = plain
        for name in above:
            inner = holder.get(name)
            holder[name] = inner if isinstance(inner, dict) else {}
            holder = holder[name]
        holder[leaf] = value
    # So that the command line may choose an option of a group, too.
    schemas = [{f"schema/{section}@{section}": kind_of(section, plain.get(section))} for section in KINDS]
    plain["defaults"] = ["schema", *schemas, "_self_", *({group: None} for group in groups())]
    ConfigStore.instance().store(NAME, plain)
    return configure([*arguments, f"--config-name={NAME}"], world_size)
