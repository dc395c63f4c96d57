"""`<run.dir>/config.yaml`: every key of the run's config as the newest attempt has it, for people."""

import json
import re
from collections.abc import Sequence
from typing import Any

import yaml
from omegaconf import OmegaConf

from mingpt.cli.console import Say, complain
from mingpt.cli.redact import BLANK, without_secrets
from mingpt.config.keys import held_at
from mingpt.config.schema import Config
from mingpt.errors import UserError
from mingpt.files.folder import Folder

NAME = "config.yaml"
DEEPEST = 16  # a mixture's keys have 5 levels
LONGEST = 2**17  # bytes; the largest of ours has some 3,000


def public_config(config: Config) -> dict[str, Any]:
    """The plain config without secrets, as a run's files have it."""
    return dict(without_secrets(config.model_dump()))


def lacks_secret(value: object) -> bool:
    """Whether a value of a run's files has lost a secret."""
    return isinstance(value, str) and BLANK in value


def overrides_line(overrides: Sequence[str], config: Config) -> str:
    """What the command line sets. All other keys are in the file, and in what `--cfg job` prints.

    Values come from the config, in which each has its key: a text alone does not tell what is a secret.
    """
    shown: Any = public_config(config)
    said = dict[str, str]()
    for text in overrides:
        key = text.partition("=")[0].lstrip("+~")
        value = held_at(key, shown)
        if value is not None and not isinstance(value, dict):
            said[key] = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        else:  # a group and its option, or something that is told by its key alone
            said[key] = text if re.fullmatch(r"[\w./@-]+=[\w.-]+", text) else key
    return f"config: {' '.join(said.values()) or 'the defaults'}"


def as_yaml(config: Config) -> str:
    """The resolved config for people, without secrets."""
    return OmegaConf.to_yaml(OmegaConf.create(public_config(config)))


def write_config(config: Config, log: Say) -> None:
    """Called by one process, once the attempt may go on in this run.dir. A failure is logged and ends nothing."""
    try:
        Folder(config.run.dir).write(NAME, as_yaml(config).encode())
    except Exception as error:
        log(f"{NAME} can't be written: {str(error) or type(error).__name__}. The run goes on.")


def create_config(config: Config, claim: str) -> None:
    """Write the file for a new run. claim: a comment in it. Raises UserError if another one is there."""
    folder, content = Folder(config.run.dir), f"# {claim}\n{as_yaml(config)}".encode()
    folder.create(NAME, content)
    if folder.read(NAME, LONGEST) != content:
        where = folder.path(NAME)
        raise UserError(f"{where} is that of another run, or of another fork that goes on: give a place of its own")


class _Loader(yaml.SafeLoader):
    """YAML without aliases, of which a few bytes can stand for gigabytes, and of a bounded depth."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent) or self.depth > DEEPEST:
            raise yaml.YAMLError("an alias, or too deep")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def read_config(run_dir: str) -> dict[str, Any] | None:
    """What config.yaml says, which may be a stranger's; None where there is none.

    A line on the console names a file that is no config; None then, too.
    """
    folder = Folder(run_dir, "RUN")
    raw = folder.read(NAME, LONGEST)
    if raw is None:
        return None
    try:
        config = yaml.load(raw, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        complain(f"{folder.path(NAME)}: no config can be read from it: it is left out")
        return None
    # As a manifest's: ours has none, and another program may have written this one.
    return without_secrets(config, environment=False)
