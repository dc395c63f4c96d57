"""What is wrong with a configuration: every problem at once, each in a line that names the key and what to do.

A section may be of several kinds (`data.kind`), each with keys of its own: KINDS.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mingpt.config.schema import Config, ImagesData, Model, Own, QuestionData, Section, TextData
from mingpt.errors import UserError
from mingpt.redact import BLANK, is_secret, printable, without_secrets
from mingpt.storage import fetch_it

MOST_QUESTIONS = 2**62  # their numbers are 64-bit integers
MOST_MICROBATCHES = 1_000_000  # a step keeps a few numbers of each; far beyond, it would take all memory


def _kinds(annotation: Any) -> dict[str, type[Section]]:
    """The schema of each kind of a section that may be of several; empty for any other field."""
    members = [m for m in get_args(annotation) if isinstance(m, type) and issubclass(m, Section)]
    return {m.model_fields["kind"].default: m for m in members}


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
KINDS: dict[str, dict[str, type[Section]]] = {
    name: kinds for name, field in Config.model_fields.items() if (kinds := _kinds(field.annotation))
}


def named(schema: type[Section]) -> dict[str, FieldInfo]:
    """A section's keys, as they are written in a config."""
    return {field.alias or name: field for name, field in schema.model_fields.items()}


def takes_any(section: str, kind: str) -> bool:
    """Whether a kind has keys that no schema knows: the arguments of code of the user's own."""
    return issubclass(KINDS[section][kind], Own)


def kind_of(section: str, values: Any) -> str:
    """The kind that a section's plain values are of: the first one where they name none, or none that there is."""
    kinds, given = list(KINDS[section]), values.get("kind") if isinstance(values, Mapping) else None
    return given if given in kinds else kinds[0]


def schemas(raw: Mapping[Any, Any]) -> dict[str, type[Section]]:
    """The schema of each section of a plain config."""
    return SECTIONS | {name: kinds[kind_of(name, raw.get(name))] for name, kinds in KINDS.items()}


def keys(raw: Mapping[Any, Any] | None = None) -> dict[str, str]:
    """Every key (`section.name`) with its help text: those that there are, or those that a plain config may have."""
    out: dict[str, str] = {}
    for name, field in Config.model_fields.items():
        if name in SECTIONS:
            own = [SECTIONS[name]]
        elif name in KINDS:
            own = list(KINDS[name].values()) if raw is None else [schemas(raw)[name]]
        else:
            own = []
            out[name] = field.description or ""
        for schema in reversed(own):  # where kinds share a key, the first one's help text stays
            out |= {f"{name}.{k}": f.description or "" for k, f in named(schema).items()}
        if name in KINDS:
            out[f"{name}.kind"] = field.description or ""
    return out


def choices(key: str) -> tuple[str, ...]:
    """The words that a key takes, empty where it takes more than a few words."""
    section, _, name = key.rpartition(".")
    if section in KINDS:
        if name == "kind":
            return tuple(KINDS[section])
        having = [named(s)[name].annotation for s in KINDS[section].values() if name in named(s)]
        return tuple(dict.fromkeys(word for annotation in having for word in get_args(annotation)))
    return get_args(named(SECTIONS[section] if section else Config)[name].annotation)


def unknown(key: str, raw: Mapping[Any, Any]) -> str:
    """What to say of a key that a plain config may not have."""
    section, _, name = key.rpartition(".")
    if section in KINDS:
        kind, others = kind_of(section, raw.get(section)), KINDS[section]
        if having := [k for k, schema in others.items() if name in named(schema)]:
            return (
                f"{key} is not a key of {section}.kind={kind}, only of {', '.join(having)}: leave it out, "
                f"or choose {section}.kind={having[0]}"
            )
    return f"{printable(without_secrets(key))} is not a key{_nearest(key, raw)}"


def _nearest(key: str, raw: Mapping[Any, Any]) -> str:
    """` (did you mean …?)` for a key that does not exist, or an empty string."""
    there_are = {**keys(raw), **keys()}
    by_name = {k.rpartition(".")[2]: k for k in there_are}
    section, _, name = key.rpartition(".")
    own = [k.rpartition(".")[2] for k in there_are if k.startswith(f"{section}.")]  # a slip in the name, section right
    for candidates in (own, list(by_name)):
        if close := get_close_matches(name, candidates, n=1, cutoff=0.7):
            right = f"{section}.{close[0]}" if candidates is own else by_name[close[0]]
            return f" (did you mean {right}?)"
    return ""


@dataclass(frozen=True)
class Check:
    """An impossible combination: the keys that it reads, and a test that gives the problem or None.

    Every key that is read is named, so that a check whose keys are mistyped already is passed over: one mistake, one
    line.
    """

    reads: tuple[str, ...]
    problem: Callable[[Config, int], str | None]


def _heads(c: Config, _: int) -> str | None:
    if isinstance(c.model, Model) and c.model.n_embd % c.model.n_head:
        return f"model.n_head={c.model.n_head} does not divide model.n_embd={c.model.n_embd}: choose a divisor"
    return None


def _microbatches(c: Config, world_size: int) -> str | None:
    size, micro = c.global_size(world_size), c.batch.micro_size
    if c.batch.per_process_size is not None:
        if c.batch.per_process_size % micro:
            return (
                f"batch.per_process_size={c.batch.per_process_size} is not a multiple of batch.micro_size={micro}: "
                f"choose a multiple"
            )
    elif size % micro:
        below = size // micro * micro
        return f"batch.global_size={size} is not a multiple of batch.micro_size={micro}: " + (
            f"the nearest are {below} and {below + micro}" if below else f"the nearest is {micro}"
        )
    elif size // micro < world_size:
        return (
            f"{world_size} processes, but only {size // micro} microbatches (batch.global_size={size} / "
            f"batch.micro_size={micro}): start at most {size // micro} processes, lower batch.micro_size or "
            f"raise batch.global_size"
        )
    if size // micro > MOST_MICROBATCHES:
        return (
            f"batch.global_size={size} / batch.micro_size={micro} is {size // micro} microbatches a step, more than "
            f"{MOST_MICROBATCHES}: lower batch.global_size or raise batch.micro_size"
        )
    return None


def _backend(c: Config, _: int) -> str | None:
    if c.world.backend == "nccl" and c.world.device == "cpu":
        return "world.backend=nccl needs GPUs, but world.device=cpu: use world.backend=gloo"
    return None


def _own(section: str) -> Check:
    """The code of the user's own that a section names: it can be imported, and takes the arguments that are there."""

    def problem(c: Config, _: int) -> str | None:
        settings = getattr(c, section)
        if not isinstance(settings, Own):
            return None
        from mingpt.config import plugin  # imports torch, which is slow, and needed for this alone

        return plugin.problem(section, settings)

    return Check((f"{section}._target_",), problem)


def _tokenizer(c: Config, _: int) -> str | None:
    if not isinstance(c.data, TextData):
        return None
    if c.data.tokens == "bpe" and c.data.tokenizer is None:
        return (
            "data.tokens=bpe needs a vocabulary: set data.tokenizer=…, for instance to data/gpt2, which "
            "`mingpt fetch gpt2-vocabulary` writes"
        )
    if c.data.tokens != "bpe" and c.data.tokenizer is not None:
        shown = without_secrets(c.data.tokenizer)
        return f"data.tokenizer={shown}, but data.tokens={c.data.tokens}: set data.tokens=bpe, or leave it out"
    return None


def _questions(c: Config, _: int) -> str | None:
    if not isinstance(c.data, QuestionData):
        return None
    if c.data.questions > MOST_QUESTIONS:
        return (
            f"data.alphabet and data.letters make {c.data.questions:.0e} questions, more than {MOST_QUESTIONS:.0e}: "
            f"lower one of them"
        )
    if c.data.val_samples >= c.data.questions:
        return (
            f"data.val_samples={c.data.val_samples} of {c.data.questions} questions leaves none to train on: lower it"
        )
    if c.data.length > c.model.block_size:
        return (
            f"model.block_size={c.model.block_size}, but a question of data.kind={c.data.kind} takes {c.data.length} "
            f"tokens: set model.block_size={c.data.length}"
        )
    return None


def _drawing(c: Config, _: int) -> str | None:
    if isinstance(c.data, ImagesData) and c.data.draw and c.data.image_weight == 0:
        return "data.draw=true, but data.image_weight=0 teaches no drawing: raise it, or set data.draw=false"
    return None


def no_weights(url: str) -> str:
    """What to say of a model.init_from without a config.json."""
    shown = f"model.init_from={without_secrets(url)}: there is no config.json"
    if Path(url, "snapshots").is_dir() or Path(url, "manifest.json").exists():
        return f"{shown}, but a run of ours: export it first: mingpt export {url} FOLDER"
    hub = url if re.fullmatch(r"[\w.-]+/[\w.-]+", url) else f"openai-community/{url}"
    known = re.fullmatch(r"(openai-community/)?(gpt2(-medium|-large|-xl)?|distilgpt2)", url)
    cure = f", for instance by `hf download {hub} --local-dir {url}`" if known else ""
    return f"{shown}: give a folder in Hugging Face's form, as save_pretrained writes it{cure}"


def missing_places(c: Config, problems: Sequence[str]) -> list[str]:
    """Local places that are not there, but those that `problems` tell of, to complete that list.

    They are looked for when they are needed, and one start is to find all.
    """
    told = {re.split("[:=]", problem, maxsplit=1)[0] for problem in problems}
    found: list[str] = []
    given = {"data.tokenizer": getattr(c.data, "tokenizer", None), "data.path": getattr(c.data, "path", None)}
    for key, url in given.items():
        if url is not None and "://" not in url and not Path(url).exists():
            found.append(f"{key}={url}: there is no such file or bucket: check the spelling{fetch_it(url)}")
    url = getattr(c.model, "init_from", None)
    if url is not None and "://" not in url and not Path(url, "config.json").exists():
        found.append(no_weights(url))
    return [problem for problem in found if problem.partition("=")[0] not in told]


CHECKS = (
    _own("model"),
    _own("data"),
    Check(("data.tokens", "data.tokenizer"), _tokenizer),
    Check(("data.draw", "data.image_weight"), _drawing),
    Check(("data.val_samples", "data.digits", "data.letters", "data.alphabet", "model.block_size"), _questions),
    Check(("model.n_head", "model.n_embd"), _heads),
    Check(("batch.global_size", "batch.micro_size", "batch.per_process_size"), _microbatches),
    Check(("world.backend", "world.device"), _backend),
)


def _words(error: ErrorDetails, key: str, raw: Mapping[str, Any]) -> str:
    """One line for one of pydantic's findings: the key, what it holds, what it takes."""
    given, kind = shown(key, error["input"]), error["type"]
    if kind == "extra_forbidden":
        return unknown(key, raw)
    if kind == "literal_error":
        return _not_a_word(key, given)
    if kind == "string_pattern_mismatch":
        return f"{key}={given!r} may hold letters, digits, '.', '-' and '_' only"
    message = error["msg"].removeprefix("Input ").replace("should", "must")
    if (
        isinstance(given, str)
        and kind.endswith(("_type", "_parsing"))
        and re.fullmatch(r"[-+.\deE]+|true|false", given)
    ):
        message += f"; what comes from the environment is a text: write \"{key}='${{oc.decode:${{oc.env:NAME}}}}'\""
    return f"{key}={given!r}: {message}"


def shown(key: str, value: object) -> Any:
    """A value for a message."""
    return BLANK if is_secret(key, value) else without_secrets(value)


def _not_a_word(key: str, given: object) -> str:
    given = printable(str(shown(key, given)))
    close = get_close_matches(given, choices(key), n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{key}={given} is not one of {', '.join(choices(key))}{hint}"


def _key(location: tuple[int | str, ...]) -> str:
    """Pydantic puts a section's kind between its name and the key's."""
    return ".".join(str(part) for i, part in enumerate(location) if i != 1 or location[0] not in KINDS)


def validate(
    raw: dict[str, Any],
    world_size: int = 1,
    *,
    also: Sequence[str] = (),
    follows: Mapping[str, Sequence[str]] | None = None,
    places: bool = False,
) -> Config:
    """The typed config of a resolved plain dict.

    also: problems found earlier, to be listed with these. follows: for keys whose values are taken from other keys,
    those keys; a wrong value is told where it comes from, not where it goes.
    places: with the problems, tell local places that are not there, too: one start finds all.
    Raises UserError with every problem: unknown keys, wrong types, values out of range, impossible combinations.
    """
    problems, wrong, good = list(also), set[str](), dict[str, Any]()
    for name, value in raw.items():
        if name == "experiment":
            problems.append("the experiment's file must begin with the line `# @package _global_`: add it")
        elif name not in Config.model_fields:
            problems.append(unknown(name, raw))
        elif name not in SECTIONS.keys() | KINDS.keys() or isinstance(value, dict):
            good[name] = value
        else:
            problems.append(f"{name}={shown(name, value)!r} is a section of keys, not a value: set {name}.<key>=…")
    for name in SECTIONS.keys() | KINDS.keys():
        good.setdefault(name, {})
    for name in KINDS:
        kind = kind_of(name, good[name])
        if (given := good[name].get("kind", kind)) != kind:
            problems.append(_not_a_word(f"{name}.kind", given))
            # Whose keys the others are is not known.
            wrong |= {key for key in keys() if key.startswith(f"{name}.")}
            good[name] = {}
        good[name] = good[name] | {"kind": kind}
    try:
        config = Config.model_validate(good)
    except ValidationError as errors:
        found = {_key(error["loc"]): error for error in errors.errors()}
        wrong |= set(found)
        for key, error in found.items():
            if not wrong.intersection((follows or {}).get(key, ())):
                problems.append(_words(error, key, raw))
            section, _, leaf = key.rpartition(".")
            if section:
                good[section] = {k: v for k, v in good[section].items() if k != leaf}
            else:
                del good[leaf]
        # With the wrong values replaced by defaults, the combinations of the right ones can still be checked.
        config = Config.model_validate(good)
    for check in CHECKS:
        if not wrong.intersection(check.reads) and (problem := check.problem(config, world_size)):
            problems.append(problem)
    if problems:
        raise UserError(*problems, *(missing_places(config, problems) if places else []))
    return config
