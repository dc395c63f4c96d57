"""The config of a fork: what a snapshot has stored, and a command line over it."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf

from mingpt.config.commandline import CommandLine, quoted
from mingpt.config.compose import configure
from mingpt.config.groups import groups
from mingpt.config.keys import KINDS
from mingpt.config.schema import AUTO, Config
from mingpt.config.trusted import named_by
from mingpt.errors import UserError
from mingpt.redact import BLANK, printable, without_secrets

NAME = "forked"  # of the file that the command line is laid over
OF_EACH_RUN = ("run.name", "run.dir", "snapshot.dir", "resume")


def branched(stored: Mapping[str, Any], overrides: Sequence[str], name: str, run_dir: str) -> Config:
    """What a fork in run_dir trains with, validated as a command line is.

    The stored config may be a stranger's: what is written in it is not resolved, and no code that it names is imported.
    A key that the command line does not name keeps its value, also where a default would follow another key. Raises
    UserError with every problem.
    """
    given = {override.key_or_group for override in CommandLine.of(overrides).overrides}
    gone = {*OF_EACH_RUN, *given, *(kind for kind in KINDS if f"{kind}.kind" in given)}
    # No other sections: Hydra would heed one of its own.
    held: dict[str, Any] = {name: deepcopy(stored[name]) for name in Config.model_fields if name in stored}
    for path in [path for path, _ in _leaves(held, ())]:
        if named_by(path, gone):
            _holder(held, path).pop(path[-1])
    problems = [f"{shown} {problem}: give {shown}=…" for shown, problem in _refused(held)]
    if problems:
        raise UserError(*problems)
    # So that the command line may choose an option of a group, too.
    held["defaults"] = ["_self_", *({group: None} for group in groups())]
    with TemporaryDirectory() as folder:
        Path(folder, f"{NAME}.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(held)))
        own = [f"run.name={quoted(name)}", f"run.dir={quoted(run_dir)}"]
        config = configure([f"--config-dir={folder}", f"--config-name={NAME}", *own, *overrides])
    assert config
    if config.batch.micro_size == AUTO:
        raise UserError("batch.micro_size=auto is for the first start of a run: give a number, or leave it out")
    return config


def secret_keys(config: Mapping[str, Any]) -> list[str]:
    """The keys whose value a stored config lacks, since it is a secret."""
    return [".".join(path) for path, value in _leaves(config, ()) if isinstance(value, str) and BLANK in value]


def _leaves(section: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in section.items():
        path = (*above, str(key))
        if isinstance(value, dict) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


def _holder(held: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    for name in path[:-1]:
        held = held[name]
    return held


def _refused(held: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for path, value in _leaves(held, ()):
        shown = printable(str(without_secrets(".".join(path))))
        if path[-1] == "_target_":
            yield shown, "names code of one's own, which is never imported because a snapshot names it"
        elif "${" in str(value) or any("${" in name for name in path):
            yield shown, "holds ${…} in the snapshot's config, which is not resolved from there"
