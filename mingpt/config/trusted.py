"""What is taken from the config in a snapshot, which may be a stranger's, and what the command line must say again."""

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from mingpt.config.commandline import CommandLine
from mingpt.config.compose import composed_of, follows_of, resolved
from mingpt.config.keys import held_at, kind_of, kinds_at, takes_any
from mingpt.config.schema import Config
from mingpt.config.validation import validate
from mingpt.errors import UserError
from mingpt.redact import printable, without_secrets

# What may be set for a program that works on a snapshot and does not train.
HEEDED = ("data", "world", "precision", "batch.micro_size", "train.threads")

# What a snapshot's config may say of the place of its data. No web address: that could be one of this machine's own
# network, such as a cloud's metadata server. And the most that it may say of what costs memory and processors.
BUCKETS = ("s3", "gs", "gcs", "az", "abfs")
OWN_PLACE = ("workers", "cache_dir", "cache_timeout_seconds", "cache_bytes")
MOST = {"batch.micro_size": 256, "train.threads": 64}


def problems_of_places(value: object) -> list[str]:
    """What keeps the texts in a stored value from being taken for places. A stranger may have written them."""
    if isinstance(value, (list, dict)):
        return [p for v in (value.values() if isinstance(value, dict) else value) for p in problems_of_places(v)]
    if not isinstance(value, str):
        return []
    scheme, separator, _ = value.partition("://")
    if separator and "***" in value:
        return ["has a secret in its URL, and snapshots keep no secrets"]
    stored = f"is {str(without_secrets(value))!r} in the snapshot's config, which may be a stranger's"
    if "::" in value or not value.isprintable():
        return [f"{stored}: chained URLs and control characters are not taken from there"]
    if separator and scheme not in BUCKETS:
        return [f"{stored}: of URLs, only those of buckets ({', '.join(BUCKETS)}) are taken from there"]
    if not separator and (re.match("[/~\\\\]|[A-Za-z0-9+.-]*:", value) or ".." in re.split(r"[/\\]", value)):
        return [f"{stored}: of paths, only those below the working directory are taken from there"]
    return []


def problems_of_size(key: str, value: object) -> list[str]:
    """What keeps a stored number from being taken."""
    if not isinstance(value, int) or value <= MOST.get(key, value):
        return []
    return [
        f"{key}={value} in the snapshot's config: more than {MOST[key]} is not taken from a snapshot, which may be a "
        f"stranger's: give {key}=…"
    ]


def leaves(section: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values of a section, and of those in it, by path; but those that are this machine's own."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from leaves(value, (*above, key))
        elif key not in OWN_PLACE:
            yield (*above, key), value


def named_by(path: tuple[str, ...], given: Container[str]) -> bool:
    """Whether the command line names a key, or a section that it is in."""
    return any(".".join(path[:n]) in given for n in range(1, len(path) + 1))


def reconfigure(stored: Mapping[str, Any], arguments: Sequence[str], world_size: int) -> Config:
    """A snapshot's config with a command line's overrides of HEEDED keys over it, for a program that does not train.

    The stored config may be a stranger's. It never meets Hydra, which would resolve what is written in it. Where caches
    are, how large, and how many processes there are is not its to say, nor where data is, unless that is a plain place
    (problems_of_places). Code that it names is not imported: that of a model is refused, and that of data must be
    named on the command line. Raises UserError with every problem.
    """
    model = stored.get("model")
    if takes_any("model", kind_of("model", model)):
        raise UserError("a model of one's own is never imported because a snapshot names it: evaluate it in a program")
    given = {override.key_or_group: override.value() for override in CommandLine.of(arguments).overrides}
    data = stored.get("data")
    data = data if isinstance(data, dict) and not {"data", "data.kind", "data._target_"} & given.keys() else None
    if data is not None and takes_any("data", kind_of("data", data)):
        raise UserError("data of one's own is never imported because a snapshot names it: give data._target_=… again")
    by_kind = data is not None or ("data.kind" in given and "data" not in given)
    chosen = [f"data={kind_of('data', data or {'kind': given['data.kind']})}"] if by_kind else []
    if data is not None:  # a section in it, of which the command line names a key, is of the kind that is stored
        inside = {".".join(key.split(".")[:3]) for key in given if key.startswith("data.") and key.count(".") > 2}
        chosen += [f"{part}.kind={kind_of(part, held_at(part, stored))}" for part in inside if kinds_at(part)]
    composed, problems = composed_of(CommandLine.of([*chosen, *arguments]))
    if unheeded := [key for key in sorted(given) if key not in HEEDED and key.partition(".")[0] not in HEEDED]:
        problems = [
            f"{printable(str(without_secrets(key)))} can't be set here, only {', '.join(HEEDED)}" for key in unheeded
        ]
    follows = follows_of(composed)
    raw, unresolved = resolved(composed, follows)
    kept = {path: value for path, value in leaves(data or {}, ("data",)) if not named_by(path, given)}
    for path, value in kept.items():
        name = printable(str(without_secrets(".".join(path))))  # a stranger's: a line feed in it would forge a line
        problems += [f"{name} {problem}: give {name}=…" for problem in problems_of_places(value)]
        holder = raw
        for section in path[:-1]:
            holder = holder.setdefault(section, {})
        holder[path[-1]] = value
    problems += [text for text in unresolved if text.partition(":")[0] not in {".".join(path) for path in kept}]
    raw["model"] = model
    for section, name in (("", "precision"), ("batch", "micro_size"), ("train", "threads")):
        before, now = (stored.get(section), raw[section]) if section else (stored, raw)
        key = f"{section}.{name}".lstrip(".")
        if key not in given and isinstance(before, Mapping) and name in before:
            now[name] = before[name]  # bits follow from it
            problems += problems_of_size(key, now[name])
    if raw["batch"]["micro_size"] == "auto":
        problems.append("batch.micro_size=auto is for training: give a number")
    raw["batch"] = {"micro_size": raw["batch"]["micro_size"]}
    if isinstance(raw["batch"]["micro_size"], int):
        # validate() wants global_size to fit the world; nothing trains here.
        raw["batch"]["global_size"] = raw["batch"]["micro_size"] * world_size
    return validate(raw, world_size, also=problems, follows=follows)
