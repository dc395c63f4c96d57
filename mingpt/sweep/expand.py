"""From overrides with several values to trials. Hydra's parser reads them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from itertools import islice, product
from math import prod

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override

from mingpt.config.checks import missing_places
from mingpt.config.commandline import CommandLine, quoted
from mingpt.config.compose import configure
from mingpt.config.groups import groups
from mingpt.config.schema import Config
from mingpt.errors import UserError
from mingpt.redact import without_secrets

LONGEST = 100  # characters of a trial's name
MOST = 1000  # trials, Slurm's own limit of an array as it comes
PLACES = ("run.dir", "run.name", "snapshot.dir")


@dataclass(frozen=True)
class Trial:
    """values: what this trial has of the keys that are swept. overrides: all that `mingpt train` gets."""

    name: str
    values: dict[str, str]
    folder: str
    overrides: tuple[str, ...]

    @property
    def places(self) -> list[str]:
        return [f"run.name={self.name}", f"run.dir={value(self.folder)}"]

    @property
    def arguments(self) -> list[str]:
        return [*self.overrides, *self.places]


def value(text: str) -> str:
    """A text as a value of Hydra's grammar, without quotes where it needs none."""
    return text if re.fullmatch(r"[A-Za-z0-9_./:-]+", text) else quoted(text)


def expand(options: Sequence[str], texts: Sequence[str], folder: str, zipped: bool = False) -> list[Trial]:
    """The trials, in the order of their values. options: of --config-dir and --config-name.

    Raises UserError with every problem of the overrides.
    """
    fixed, several, problems = divide(texts)
    swept = dict[str, list[str]]()
    for key, override in several.items():
        try:
            swept[key] = values_of(override, options, zipped)
        except UserError as problem:
            problems += problem.problems
    lengths = {key: len(values) for key, values in swept.items()}
    if zipped and len(set(lengths.values())) > 1:
        told = ", ".join(f"{key} has {n}" for key, n in lengths.items())
        problems.append(f"--zip: {told} values: give each key as many as the others")
    elif not zipped and (number := prod(lengths.values())) > MOST:
        problems.append(f"{number} trials: a sweep has at most {MOST}: give fewer values")
    if problems:
        raise UserError(*problems)
    rows = zip(*swept.values(), strict=True) if zipped and swept else product(*swept.values())
    return _named([dict(zip(swept, row, strict=True)) for row in rows], [*options, *fixed], folder)


def divide(texts: Sequence[str]) -> tuple[list[str], dict[str, Override], list[str]]:
    """The overrides that have one value, by key those that have several, and the problems."""
    parser, problems = OverridesParser.create(), list[str]()
    fixed, several = list[str](), dict[str, Override]()
    for text in texts:
        try:
            override = parser.parse_override(text)
        except Exception:  # Hydra's, ANTLR's, or Python's; CommandLine has words for it
            problems += CommandLine.of([text]).problems
            continue
        if override.key_or_group in PLACES:
            problems.append(f"{without_secrets(text)}: each trial has a place of its own: use --name and --dir")
        elif not override.is_sweep_override():
            fixed.append(text)
        elif override.get_key_element() in several:
            problems.append(f"{without_secrets(text)}: {override.key_or_group} is swept twice: write one of them")
        else:
            several[override.get_key_element()] = override
    swept = {override.key_or_group for override in several.values()}
    for text in fixed:
        if (key := text.partition("=")[0].lstrip("+~")) in swept:
            problems.append(f"{without_secrets(text)}: {key} is swept, too: write one of them")
    return fixed, several, problems


def values_of(override: Override, options: Sequence[str], repeated: bool = False) -> list[str]:
    """The values of a key, as texts of Hydra's grammar. repeated: a value may come more than once."""
    shown = without_secrets(override.input_line)
    if override.is_interval_sweep():
        raise UserError(f"{shown}: an interval has no list of values: write choice(…), or add --optimize")
    value: object = override.value()
    if isinstance(value, Glob):
        there_are = groups(CommandLine.of(options).folders)
        if override.key_or_group not in there_are:
            raise UserError(f"{shown}: glob chooses among a group's options: {', '.join(there_are)}")
        names = [
            name
            for name in there_are[override.key_or_group]
            if any(fnmatchcase(name, p) for p in value.include) and not any(fnmatchcase(name, p) for p in value.exclude)
        ]
        if not names:
            raise UserError(f"{shown}: no option of {override.key_or_group} has such a name")
        return names
    if getattr(value, "shuffle", False):
        raise UserError(f"{shown}: trials that start in a random order can't be continued: leave shuffle out")
    texts = [str(text) for text in islice(override.sweep_string_iterator(), MOST + 1)]
    if len(texts) > MOST:
        raise UserError(f"{shown}: more than {MOST} values: a sweep has at most {MOST} trials: give fewer")
    found = texts if repeated else list(dict.fromkeys(texts))
    if not found:
        raise UserError(f"{shown}: there is no value in it: check its start and stop")
    return found


def _named(rows: Sequence[dict[str, str]], fixed: Sequence[str], folder: str) -> list[Trial]:
    trials = dict[str, Trial]()
    for values in rows:
        trial = trial_of(values, fixed, folder)
        if trial.name in trials:
            own = ", ".join(f"{key}={value}" for key, value in values.items())
            raise UserError(f"{own}: another trial has the folder {trial.name}, too: change one of the values")
        trials[trial.name] = trial
    return list(trials.values())


def trial_of(values: dict[str, str], fixed: Sequence[str], folder: str) -> Trial:
    own = [f"{key}={value}" for key, value in values.items()]
    name = name_of(own)
    return Trial(name, values, f"{folder}/{name}", (*fixed, *own))


def name_of(overrides: Sequence[str]) -> str:
    """A name that any file system, bucket and shell takes, as run.name must be; it ends in a checksum where it lost."""
    plain = "_".join(o.replace("=", "-", 1) for o in overrides) or "only"
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).lstrip("._-") or "trial"
    if safe == plain and len(safe) <= LONGEST:
        return safe
    return f"{safe[: LONGEST - 9]}-{sha256(plain.encode()).hexdigest()[:8]}"


def validate(trials: Sequence[Trial], world_size: int = 1, places: bool = False) -> dict[str, Config]:
    """The config of each trial, by name. Raises UserError with every problem of every trial.

    places: also what is not on this machine's disk, where the trials are to run here.
    """
    found, problems = dict[str, Config](), dict[str, list[str]]()
    for trial in trials:
        try:
            config = configure(trial.arguments, world_size)
            assert config is not None
            found[trial.name] = config
            if places and (missing := missing_places(config, [])):
                raise UserError(*missing)
        except UserError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(trial.name)
    if problems:
        raise UserError(*(p if len(n) == len(trials) else f"{', '.join(n)}: {p}" for p, n in problems.items()))
    return found
