"""The config of a past attempt, for computing its steps again: what a snapshot stores, and where things lie here."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from mingpt.config.affecting import settings
from mingpt.config.commandline import CommandLine
from mingpt.config.keys import filled, keys, kind_of, takes_any
from mingpt.config.schema import Config
from mingpt.config.trusted import leaves, named_by, problems_of_places
from mingpt.config.validation import validate
from mingpt.errors import UserError
from mingpt.redact import printable, without_secrets

HERE = ("data", "world")  # sections of which an override may say what is so on this machine
WHOLE = ("model", "batch", "optimizer", "schedule", "seed", "reduce", "precision")


def recorded(stored: Mapping[str, Any], here: Sequence[str] = (), changed: Sequence[str] = ()) -> Config:
    """The config that `stored` is, as far as steps follow from it.

    here: overrides for this machine, such as data.path=…; none may affect the result. changed: settings that may.
    The stored config may be a stranger's: nothing in it is resolved or imported, and places of data are taken as
    `trusted.reconfigure` takes them. Raises UserError with every problem.
    """
    given, problems = _given(here)
    new, more = _given(changed)
    raw = _of_steps(stored)
    before, _ = settings(raw)
    problems += more + _untrusted(raw, given)
    if new.get("batch.micro_size") == "auto":
        problems.append("--set batch.micro_size=auto is for training: give a number")
    for key, value in (given | new).items():
        _set(raw, key, value)
    if problems := [*problems, *_misplaced(raw, given, new, before)]:
        raise UserError(*dict.fromkeys(problems))  # before `validate`, which imports the code that a config names
    return validate(raw, typed={*given, *new})


def _given(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    line = CommandLine.of([*arguments])
    problems = [*line.problems]
    for override in line.overrides:
        text = without_secrets(override.input_line)
        if override.is_delete() or override.is_add() or override.package is not None:
            problems.append(f"{text}: write key=value")
        elif "${" in str(override.value()):
            problems.append(f"{text}: nothing is resolved here: write the value out")
    return {o.key_or_group: o.value() for o in line.overrides}, problems


def _of_steps(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What steps follow from; all else is left to the defaults: none of it is this run's to say on this machine."""
    whole = deepcopy(filled(stored))
    _, affecting = settings(stored)
    raw = {name: whole[name] for name in WHOLE}
    raw["train"] = {k: v for k, v in whole["train"].items() if f"train.{k}" in affecting or k == "max_steps"}
    raw["health"] = {k: v for k, v in whole["health"].items() if f"health.{k}" in affecting or k == "max_skips"}
    raw["data"] = {}
    for path, value in leaves(whole["data"], ()):
        _set(raw, ".".join(("data", *path)), value)
    return raw


def _untrusted(raw: dict[str, Any], given: Mapping[str, Any]) -> list[str]:
    """What may not be taken from a stored config, which may be a stranger's."""
    problems = [
        f"{section} is code of one's own, which is never imported because a snapshot names it: give "
        f"{section}._target_=… again"
        for section in ("model", "data")
        if takes_any(section, kind_of(section, raw[section])) and f"{section}._target_" not in given
    ]
    for path, value in leaves(raw["data"], ("data",)):
        if not named_by(path, given):
            name = printable(str(without_secrets(".".join(path))))
            problems += [f"{name} {problem}: give {name}=…" for problem in problems_of_places(value)]
    return problems


def _misplaced(
    raw: dict[str, Any], given: Mapping[str, Any], new: Mapping[str, Any], before: Mapping[str, Any]
) -> list[str]:
    """Overrides that stand where others belong."""
    (after, affecting), known = settings(raw), keys(raw)
    elsewhere = [key for key in given if key.partition(".")[0] not in HERE and key != "model._target_"]
    wrong = [f"{key} can't be set here, only keys of {' and '.join(HERE)}" for key in elsewhere]
    wrong += [
        f"{key}={given[key]} would affect the result, and the run had {before.get(key)}: leave it out"
        for key in given
        if key not in elsewhere and key in affecting and after.get(key) != before.get(key)
    ]
    for key in new:
        if key.partition(".")[0] == "data":
            wrong.append(f"--set {key}: the samples of a step are those of the run: fork the run for other data")
        elif key in known and key not in affecting:
            wrong.append(f"--set {key}: this key does not affect the result: leave it out")
    return wrong


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    *above, leaf = key.split(".")
    for name in above:
        held = raw.get(name)
        raw[name] = held if isinstance(held, dict) else {}
        raw = raw[name]
    raw[leaf] = value
