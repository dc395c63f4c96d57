"""Whether all processes of an attempt were started with the same config and data."""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from mingpt.compute.numerics import differences
from mingpt.config.affecting import settings
from mingpt.config.configfile import public_config
from mingpt.config.schema import Config
from mingpt.data.source import Source
from mingpt.errors import UserError
from mingpt.world.world import World


def agree_on_inputs(world: World, config: Config, source: Source) -> None:
    """Raise UserError in every process unless all have the same config and the same data.

    Keys of `data` that do not affect the result (paths, caches, loader workers) may differ between nodes.
    """
    vocabulary = sha256(json.dumps(source.vocabulary.to_json(), sort_keys=True).encode()).hexdigest()
    content = {"data.sha256": source.sha256, "data.vocabulary": vocabulary}
    # Twice: secrets must be equal, too, and a message takes the values without them.
    inputs = [content | _shared(values) for values in (config.model_dump(), public_config(config))]
    (first, shown), *others = world.gather(inputs)
    for rank, (other, other_shown) in enumerate(others, 1):
        if changed := differences(first, other):
            # If only secrets differ, name the keys without values.
            changes = ", ".join(differences(shown, other_shown) or (c.split(":")[0] for c in changed))
            raise UserError(
                f"process {rank} has other settings or data than process 0: {changes}: start all nodes with the same "
                f"overrides and the same data"
            )


def _shared(config: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal of a plain config: all of it, but of its data what affects the result."""
    values, affecting = settings(config)
    data = {key.removeprefix("data."): values[key] for key in sorted(affecting) if key.startswith("data.")}
    return {**config, "data": data}
