"""Which settings of a run are not the defaults, and in which several runs differ. Configs may be a stranger's."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mingpt.compose.stored import is_below
from mingpt.config.keys import KINDS, SECTIONS, default, leaves, named, schema_of

OWN = ("run", "snapshot.dir")  # what differs between any two runs


def with_defaults(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key, value, default) of each setting; the default of a key that no schema knows is None."""
    for key, value in leaves(config):
        section, _, name = key.rpartition(".")
        fields = named(schema_of(section, config)) if section in ("", *SECTIONS, *KINDS) else {}
        usual = default(fields[name], config) if name in fields else None
        if name == "kind" and section in KINDS:  # each kind has its own name as the default
            usual = next(iter(KINDS[section]))
        yield key, value, usual


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys in which runs differ, of those that all of them have: another kind of model lacks many.

    Left out is a key that has its default in all runs, such as one that follows another key: it tells nothing new.
    """
    values, found = [dict(leaves(config)) for config in configs], list[str]()
    chosen = {key for config in configs for key, value, usual in with_defaults(config) if value != usual}
    for key in next(iter(values), {}):
        everywhere = all(key in of_run for of_run in values)
        if everywhere and key in chosen and not is_below(key, OWN) and len({str(of_run[key]) for of_run in values}) > 1:
            found.append(key)
    return found
