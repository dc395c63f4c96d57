"""What is wrong with a configuration: every problem at once, each in a line that names the key and what to do."""

import re
from collections.abc import Container, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mingpt.cli.console import printable
from mingpt.config.checks import impossible, missing_places
from mingpt.config.keys import KINDS, SECTIONS, Raw, choices, filled, held_at, keys, kind_of, parts_in, schemas
from mingpt.config.names import unknown
from mingpt.config.schema import Config
from mingpt.config.section import Section
from mingpt.errors import UserError


def _words(error: ErrorDetails, key: str, raw: Raw, typed: Container[str] | None) -> str:
    """One line for one of pydantic's findings: the key, what it holds, what it takes."""
    value, kind = error["input"], error["type"]
    if kind == "extra_forbidden":
        return unknown(key, raw, in_file=typed is not None and ".".join(key.split(".")[:2]) not in typed)
    if kind == "literal_error":
        return _not_a_word(key, value)
    if kind == "string_pattern_mismatch":
        return f"{key}={value!r} may hold letters, digits, '.', '-' and '_' only"
    if kind == "list_type" and isinstance(value, str):
        return f"{key}={value}: must be a list: write {key}=[{value}]"
    if kind == "string_type" and isinstance(value, (int, float)):
        return f"{key}={value} must be a text: quotes make it one: {key}='\"{value}\"'"
    message = error["msg"].removeprefix("Input ").replace("should", "must")
    if (
        isinstance(value, str)
        and kind.endswith(("_type", "_parsing"))
        and re.fullmatch(r"[-+.\deE]+|true|false", value)
    ):
        message += f"; what comes from the environment is a text: write \"{key}='${{oc.decode:${{oc.env:NAME}}}}'\""
    return f"{key}={value!r}: {message}"


def _not_a_word(key: str, value: object) -> str:
    word = printable(str(value))
    close = get_close_matches(word, choices(key), n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{key}={word} is not one of {', '.join(choices(key))}{hint}"


def _typed(raw: dict[str, Any]) -> tuple[Config | None, dict[str, ErrorDetails]]:
    """The config of a plain dict that has all sections, or else pydantic's finding for each key that is wrong."""
    mistakes: dict[str, ErrorDetails] = {}
    sections: dict[str, Section] = {}

    def made(name: str, schema: type[Section], values: Raw) -> Section | None:
        inner = {key: dict(values[key]) for key, *_ in parts_in(schema, values)}
        for key, part, kind, held in parts_in(schema, values):
            if (section := made(f"{name}.{key}.{part}", kind, held)) is not None:
                inner[key][part] = section
            else:
                del inner[key][part]
        try:
            return schema.model_validate({**values, **inner})
        except ValidationError as errors:
            for error in errors.errors():
                own, *inside = map(str, error["loc"])  # of a field with sections: which of them is none
                mistakes[".".join([name, own, *(inside[:1] if own in inner else ())])] = error
            return None

    for name, schema in schemas(raw).items():
        if (section := made(name, schema, raw[name])) is not None:
            sections[name] = section
    try:
        config = Config.model_validate(raw | sections)
    except ValidationError as errors:
        for error in errors.errors():
            name = str(error["loc"][0])
            if name not in schemas(raw):  # a section's own mistakes are found already
                mistakes[name] = error
    order = list(Config.model_fields)
    ordered = sorted(mistakes, key=lambda key: order.index(key.partition(".")[0]))
    return (None if mistakes else config), {key: mistakes[key] for key in ordered}


def validate(
    raw: dict[str, Any],
    world_size: int = 1,
    *,
    also: Sequence[str] = (),
    follows: Mapping[str, Sequence[str]] | None = None,
    typed: Container[str] | None = None,
    places: bool = False,
    trains: bool = True,
) -> Config:
    """The typed config of a resolved plain dict.

    also: problems found earlier, to be listed with these. follows: for keys whose values are taken from other keys,
    those keys; a wrong value is told where it comes from, not where it goes.
    typed: the keys that the command line names, if there is one; a file sets all others.
    places: with the problems, tell local places that are not there, too: one start finds all.
    trains: see compose.configure.
    Raises UserError with every problem: unknown keys, wrong types, values out of range, impossible combinations.
    """
    problems, wrong, good = list(also), set[str](), dict[str, Any]()
    for name, value in raw.items():
        if name == "experiment":
            problems.append("the experiment's file must begin with the line `# @package _global_`: add it")
        elif name not in Config.model_fields:
            for inner in value if isinstance(value, dict) and value else [""]:
                problems.append(unknown(f"{name}.{inner}" if inner else name, raw))
        elif isinstance(value, dict):
            good[name] = deepcopy(value)
        elif name not in SECTIONS and name not in KINDS:
            good[name] = value
        else:
            problems.append(f"{name}={value!r} is a section of keys, not a value: set {name}.<key>=…")
    for name in KINDS:
        section = good.get(name, {})
        kind = kind_of(name, section)
        if (given := section.get("kind", kind)) != kind:
            problems.append(_not_a_word(f"{name}.kind", given))
            # Whose keys the others are is not known.
            wrong |= {key for key in keys() if key.startswith(f"{name}.")}
            section = {}
        good[name] = section | {"kind": kind}
    config, mistakes = _typed(filled(good))
    if config is None:
        wrong |= set(mistakes)
        for key, error in mistakes.items():
            if not wrong.intersection((follows or {}).get(key, ())):
                problems.append(_words(error, key, raw, typed))
            section, _, leaf = key.rpartition(".")
            holder = held_at(section, good) if section else good
            if isinstance(holder, dict):
                holder.pop(leaf, None)
        # With the wrong values replaced by defaults, the combinations of the right ones can still be checked.
        config, _ = _typed(filled(good))
        assert config is not None
    problems += impossible(config, world_size, wrong, trains)
    if problems:
        problems = list(dict.fromkeys(problems))  # a file and the command line may have the same one
        raise UserError(*problems, *(missing_places(config, problems) if places else []))
    return config
