"""Which settings of a config affect the result: the schema says it at each field (AffectsResult)."""

from collections.abc import Mapping
from typing import Any

from pydantic.fields import FieldInfo

from mingpt.config.keys import Raw, filled, named, parts_in, schemas
from mingpt.config.schema import Config
from mingpt.config.section import AffectsResult, Own, Section


def settings(raw: Raw) -> tuple[dict[str, Any], set[str]]:
    """Every key's value, the default for a key that the config lacks; and which ones matter."""
    values, affecting, of, raw = dict[str, Any](), set[str](), schemas(raw), filled(raw)

    def add(key: str, field: FieldInfo, name: str, section: Raw) -> None:
        values[key] = section[name]
        if affects_result(field, section):
            affecting.add(key)

    def add_section(name: str, schema: type[Section], section: Raw) -> None:
        fields, parts = named(schema), parts_in(schema, section)
        for key, inner in fields.items():
            if key not in {holder for holder, *_ in parts}:
                add(f"{name}.{key}", inner, key, section)
        for holder, key, inner_schema, part in parts:
            add_section(f"{name}.{holder}.{key}", inner_schema, part)
        if issubclass(schema, Own):  # all other keys are arguments of the user's code
            for argument, value in section.items():
                if argument not in fields:
                    values[f"{name}.{argument}"] = value
                    affecting.add(f"{name}.{argument}")

    for name, field in Config.model_fields.items():
        if name not in of:
            add(name, field, name, raw)
        elif affects_result(field, raw):
            add_section(name, of[name], raw[name])
    return values, affecting


def affects_result(field: FieldInfo, section: Raw) -> bool:
    return all(mark.when(section) for mark in field.metadata if isinstance(mark, AffectsResult))


def section_of(raw: Raw, section: str) -> Raw:
    found = raw.get(section)
    return found if isinstance(found, Mapping) else {}
