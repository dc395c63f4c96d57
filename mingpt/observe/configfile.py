"""`<run.dir>/config.yaml`: every key of the run's config as the newest attempt has it, for people."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from mingpt.atomic import write_whole
from mingpt.config.compose import as_yaml
from mingpt.config.schema import Config
from mingpt.redact import without_secrets
from mingpt.storage import is_local, open_fs, place

NAME = "config.yaml"


def overrides_line(overrides: Sequence[str], config: Config) -> str:
    """What the command line sets. All other keys are in the file, and in what `--cfg job` prints.

    Values come from the config, in which each has its key: a text alone does not tell what is a secret.
    """
    shown, said = without_secrets(config.model_dump()), dict[str, str]()
    for text in overrides:
        key, value = text.partition("=")[0].lstrip("+~"), shown
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None and not isinstance(value, dict):
            said[key] = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        else:  # a group and its option, or something that is told by its key alone
            said[key] = text if re.fullmatch(r"[\w./@-]+=[\w.-]+", text) else key
    return f"config: {' '.join(said.values()) or 'the defaults'}"


def write_config(config: Config, log: Callable[[str], None]) -> None:
    """Called by one process, once the attempt may go on in this run.dir. A failure is logged and ends nothing."""
    try:
        fs, root = open_fs(config.run.dir, "run.dir")
        path, content = f"{root.rstrip('/')}/{NAME}", as_yaml(config).encode()
        with place("run.dir", config.run.dir):
            if is_local(fs):
                write_whole(Path(path), [content])
            else:
                fs.pipe_file(path, content)
    except Exception as error:
        log(f"{NAME} can't be written: {str(error) or type(error).__name__}. The run goes on.")
