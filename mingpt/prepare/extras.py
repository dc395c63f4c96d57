"""`python -m mingpt.prepare.extras [--from-env] [overrides]`: the extras of this package that such a run needs.

recipes/setup.sh installs them. They follow from the run's composed config, so no recipe has to list them. What can't
work on SkyPilot's machines ends the set-up here. It is asked before torch is installed, too, for the mistakes alone:
what it imports needs hydra, pydantic and fsspec, and nothing else that is not Python's own.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mingpt.cli.command import code_of, expanded
from mingpt.cli.console import complain, ended, say
from mingpt.compose import compose
from mingpt.config.checks import HUB_KEYS
from mingpt.config.schema import Config
from mingpt.errors import FINISHED
from mingpt.files import hub
from mingpt.files.folder import alone
from mingpt.files.storage import EXTRAS


def extras(config: Config) -> set[str]:
    # For each URL in the config, the extra that brings its store's client.
    schemes = {text.partition("://")[0] for text in _strings(config.model_dump())}
    stores = {EXTRAS[scheme] for scheme in schemes if scheme in EXTRAS}
    # Without `track`, curves go to TensorBoard where it is installed: it is, where set-up has been.
    trackers = {"tensorboard"} if config.track is None else {*config.track}
    return config.data.extras() | stores | trackers


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str) and "://" in value:
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in HUB_KEYS and isinstance(item, str) and hub.model_at(item):
                yield hub.SCHEME
            yield from _strings(item)


def check_machines(config: Config, environment: Mapping[str, str]) -> None:
    """Say so if one of SkyPilot's machines will have run.dir alone.

    Each cloud VM has a disk of its own. Slurm's nodes share a home. An absolute path may be a mount: the nodes compare
    what they see there before training.
    """
    nodes = environment.get("SKYPILOT_SETUP_NODE_IPS", "").split()
    home, run_dir = environment.get("SKY_RUNTIME_DIR") or environment.get("HOME", ""), config.run.dir
    on_slurm = environment.get("SLURM_JOB_ID") or Path(home, ".sky/.sky_slurm_cluster").exists()
    if len(nodes) > 1 and not on_slurm and "://" not in run_dir and not Path(run_dir).is_absolute():
        complain(f"WARNING: {alone(run_dir, 'one node')}")


def main(arguments: list[str]) -> int:
    config = compose.configure(expanded("extras", arguments, os.environ), trains=False)
    check_machines(config, os.environ)
    for extra in sorted(extras(config)):
        say(extra)
    return FINISHED


if __name__ == "__main__":
    sys.exit(ended(code_of(partial(main, sys.argv[1:]))))
