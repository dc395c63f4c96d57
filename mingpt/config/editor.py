"""`mingpt train --json-schema`: the JSON schema of config files, by which editors complete, explain and check keys."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic.json_schema import models_json_schema

from mingpt.cli.console import put
from mingpt.config.keys import KINDS, named, parts_of
from mingpt.config.schema import Config
from mingpt.config.section import Section
from mingpt.errors import FINISHED

# What may stand in place of any value: ${another.key}, or ??? for one that the command line has to give.
REFERENCE = {"type": "string", "pattern": r"^\?\?\?$|\$\{.+\}"}
AT = "#/$defs/"


def print_schema(arguments: list[str]) -> int:
    """The options of `mingpt train` beside --json-schema change nothing."""
    put(f"{text()}\n")  # not `say`: to it `"notify": {` begins a secret
    return FINISHED


def text() -> str:
    return json.dumps(schema(), indent=1)


def schema() -> dict[str, Any]:
    """A file may leave out any key, so none is required."""
    sections: list[type[Section]] = [Config, *_kinds()]
    by_name = {section.__name__: section for section in sections}
    _, document = models_json_schema([(section, "validation") for section in by_name.values()])
    definitions = document["$defs"]
    for name, definition in definitions.items():
        definition.pop("required", None)
        fields = named(by_name[name]) if name in by_name else {}
        for key, value in definition["properties"].items():
            if parts := parts_of(fields.get(key)):
                value["additionalProperties"] = _one_of(parts)
            elif "$ref" not in value:
                definition["properties"][key] = _or_reference(value)
    top = definitions.pop("Config")
    top["properties"] |= {section: _one_of(kinds) for section, kinds in KINDS.items()}
    top["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    definitions["Reference"] = REFERENCE
    return {"$schema": "http://json-schema.org/draft-07/schema#", **top, "$defs": definitions}


def _kinds() -> Iterator[type[Section]]:
    """The kinds of models and data, and of what they hold."""
    for kinds in KINDS.values():
        for kind in kinds.values():
            yield kind
            for field in named(kind).values():
                yield from parts_of(field).values()


def _one_of(kinds: Any) -> dict[str, Any]:
    return {"anyOf": [{"$ref": f"{AT}{kind.__name__}"} for kind in kinds.values()]}


def _or_reference(value: dict[str, Any]) -> dict[str, Any]:
    about: dict[str, Any] = {name: value.pop(name) for name in ("description", "default") if name in value}
    value.pop("title", None)
    takes = [*value.pop("anyOf", []), *([value] if value else [])]
    return {**about, "anyOf": [*takes, {"$ref": f"{AT}Reference"}]} if takes else about
