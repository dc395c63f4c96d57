"""Which keys a config has, and what is known of each: the schema of every section, by the kinds that a config names."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic.fields import FieldInfo

from mingpt.config.datasets import ChatData, MixData, OwnData, RandomData, ShardsData, TextData
from mingpt.config.kinds import Kind
from mingpt.config.models import GPTModel, ModernModel, OwnModel
from mingpt.config.schema import OWN, Config
from mingpt.config.section import Parts, Section

Raw = Mapping[str, Any]  # a config, or a section of one, that may be a stranger's

AnySection = TypeVar("AnySection", bound=Section)


def _by_name(*kinds: type[AnySection]) -> dict[str, type[AnySection]]:
    return {kind.model_fields["kind"].default: kind for kind in kinds}


# The kinds of each section, in the order of messages and --help. The first is that of a section that names none.
KINDS: dict[str, dict[str, type[Kind]]] = {
    "model": _by_name(GPTModel, ModernModel, OwnModel),
    "data": _by_name(TextData, ChatData, MixData, OwnData, RandomData, ShardsData),
}
SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if name not in KINDS and isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
# The keys outside of all sections, such as `seed`.
OUTSIDE = [name for name in Config.model_fields if name not in SECTIONS and name not in KINDS]
FOLLOWED = re.compile(r"\$\{([\w.]+)\}")


def named(schema: type[Section]) -> dict[str, FieldInfo]:
    """A section's keys, as they are written in a config."""
    return {field.alias or name: field for name, field in schema.model_fields.items()}


def parts_of(field: FieldInfo | None) -> dict[str, type[Section]]:
    """The kinds of the sections that a field holds by name; none for a field that holds a value."""
    for mark in field.metadata if field else ():
        if isinstance(mark, Parts):
            return _by_name(*mark.schemas)
    return {}


def parts_in(schema: type[Section], values: Raw) -> list[tuple[str, str, type[Section], Raw]]:
    """(field, name, schema, plain values) of each section that a section's plain values hold."""
    sections = list[tuple[str, str, type[Section], Raw]]()
    for key, field in named(schema).items():
        kinds = parts_of(field)
        parts = values.get(key)
        if not kinds or not isinstance(parts, Mapping):
            continue
        for name, part in parts.items():
            if isinstance(part, Mapping):
                sections.append((key, name, kinds[_chosen(kinds, part)], part))
    return sections


def kinds_at(section: str) -> Mapping[str, type[Section]]:
    """The kinds that a section may be of: `data`, or one that it holds, such as `data.mix.web`."""
    top, *inner = section.split(".")
    kinds = KINDS.get(top, {})
    if len(inner) != 2:
        return {} if inner else kinds
    for kind in kinds.values():
        if parts := parts_of(named(kind).get(inner[0])):
            return parts
    return {}


def kind_of(section: str, values: Any) -> str:
    """The kind that a section's plain values are of: the first one where they name none, or none that there is."""
    return _chosen(kinds_at(section), values)


def _chosen(kinds: Mapping[str, Any], values: Any) -> str:
    given = values.get("kind") if isinstance(values, Mapping) else None
    return given if isinstance(given, str) and given in kinds else next(iter(kinds))


def schema_of(section: str, raw: Mapping[Any, Any]) -> type[Section]:
    """The schema of a section of a plain config; of "", the keys outside all sections, Config itself."""
    if section in KINDS:
        return KINDS[section][kind_of(section, raw.get(section))]
    if section in OWN and isinstance(values := raw.get(section), Mapping) and values.get("_target_"):
        return OWN[section]
    return SECTIONS[section] if section else Config


def held_at(section: str, raw: Mapping[Any, Any]) -> Any:
    """What a plain config holds for a section, or for one that it holds, such as `data.mix.web`."""
    held: Any = raw
    for name in section.split("."):
        held = held.get(name) if isinstance(held, Mapping) else None
    return held


def schemas(raw: Mapping[Any, Any]) -> dict[str, type[Section]]:
    """The schema of each section of a plain config."""
    return {name: schema_of(name, raw) for name in Config.model_fields if name not in OUTSIDE}


def keys(raw: Mapping[Any, Any] | None = None) -> dict[str, str]:
    """Every key (`section.name`) with its help text: those that there are, or those that a plain config may have."""
    out: dict[str, str] = {}
    for name, field in Config.model_fields.items():
        if name in SECTIONS:
            own: list[type[Section]] = [SECTIONS[name]]
        elif name in KINDS:
            own = list(KINDS[name].values()) if raw is None else [schema_of(name, raw)]
        else:
            own = []
            out[name] = field.description or ""
        for schema in reversed(own):  # where kinds share a key, the first one's help text stays
            for key, of_key in named(schema).items():
                out[f"{name}.{key}"] = of_key.description or ""
        if name in KINDS:
            out[f"{name}.kind"] = field.description or ""
    return out


def choices(key: str) -> tuple[str, ...]:
    """The words that a key takes, empty where it takes more than a few words."""
    section, _, name = key.rpartition(".")
    if kinds := kinds_at(section):
        if name == "kind":
            return tuple(kinds)
        words = list[str]()
        for schema in kinds.values():
            if name in named(schema):
                words += _words(named(schema)[name].annotation)
        return tuple(dict.fromkeys(words))
    return tuple(_words(named(schema_of(section, {}))[name].annotation))


def _words(annotation: Any) -> Iterator[str]:
    """The words in an annotation such as list[Literal["a", "b"]] | None, or bool | Literal["auto"]."""
    for inner in get_args(annotation):
        if isinstance(inner, str):
            yield inner
        elif inner is bool:
            yield from ("true", "false")
        else:
            yield from _words(inner)


def kinds_having(section: str, name: str) -> list[str]:
    return [kind for kind, schema in kinds_at(section).items() if name in named(schema)]


def default(field: FieldInfo, raw: Raw) -> Any:
    """A field's default, which may follow other keys of a plain config."""
    value = field.get_default()
    if not isinstance(value, str):
        return value
    if whole := FOLLOWED.fullmatch(value):
        return value_of(whole[1], raw)
    return FOLLOWED.sub(lambda found: str(value_of(found[1], raw)), value)


def value_of(key: str, raw: Raw) -> Any:
    """What a plain config holds for a key, or else its default."""
    section, _, name = key.rpartition(".")
    holder = raw.get(section) if section else raw
    if isinstance(holder, Mapping) and name in holder:
        return holder[name]
    field = named(schema_of(section, raw)).get(name)
    return default(field, raw) if field else None


def filled(raw: Raw) -> dict[str, Any]:
    """A plain config with the default of each key that is missing. Nothing that is written in it is resolved."""
    out = {name: value_of(name, raw) for name in OUTSIDE}
    for section, schema in schemas(raw).items():
        held = raw.get(section)
        out[section] = complete(schema, held if isinstance(held, Mapping) else {}, lambda field: default(field, raw))
    return {**raw, **out}


def declared(section: str, raw: Raw) -> dict[str, Any]:
    """What a section of a plain config holds, or its defaults, without the arguments of code of the user's own."""
    values = filled(raw)[section]
    return {key: values[key] for key in named(SECTIONS[section])}


def complete(schema: type[Section], values: Raw, of: Callable[[FieldInfo], Any]) -> dict[str, Any]:
    """A section's plain values with the default of each key that is missing, also in its parts. of: gives a default."""
    out = {**values}
    for key, field in named(schema).items():
        if key not in values:
            out[key] = of(field)
    for key, name, inner, part in parts_in(schema, out):
        out[key] = out[key] | {name: complete(inner, part, of)}
    return out


def description(kind: type[Kind]) -> str:
    return kind.model_fields["kind"].description or ""


def leaves(section: Raw, above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a plain config, and of the sections in it, by key."""
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
