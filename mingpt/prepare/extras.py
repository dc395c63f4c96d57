"""`python -m mingpt.prepare.extras [overrides]`: the extras of this package that such a run needs, one a line.

recipes/setup.sh installs them. They follow from the run's composed config, so no recipe has to list them.
"""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from mingpt.command import code_of
from mingpt.config import compose
from mingpt.config.schema import Config
from mingpt.console import ended, say
from mingpt.errors import FINISHED
from mingpt.storage import EXTRAS


def extras(config: Config) -> set[str]:
    # For each URL in the config, the extra that brings its store's client.
    schemes = {text.partition("://")[0] for text in _strings(config.model_dump())}
    stores = {EXTRAS[scheme] for scheme in schemes if scheme in EXTRAS}
    # Without `track`, curves go to TensorBoard where it is installed: it is, where set-up has been.
    trackers = {"tensorboard"} if config.track is None else {*config.track}
    found = config.data.extras() | stores | trackers
    if config.train.eval_tasks:
        found.add("eval")
    return found


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str) and "://" in value:
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)


def main(arguments: list[str]) -> int:
    config = compose.configure(arguments, trains=False)
    for extra in sorted(extras(config)) if config is not None else ():
        say(extra)
    return FINISHED


if __name__ == "__main__":
    sys.exit(ended(code_of(partial(main, sys.argv[1:]))))
