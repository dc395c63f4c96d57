"""Whether all processes of an attempt were started with the same config and data."""

import json
from hashlib import sha256

from mingpt.cli.redact import without_secrets
from mingpt.compute.numerics import differences
from mingpt.config.affecting import settings
from mingpt.config.schema import Config
from mingpt.data.source import Source
from mingpt.errors import UserError
from mingpt.world.world import World


def agree_on_inputs(world: World, config: Config, source: Source) -> None:
    """Raise UserError in every process unless all have the same config and the same data.

    Keys of `data` that do not affect the result (paths, caches, loader workers) may differ between nodes.
    """
    inputs = config.model_dump()
    values, affecting = settings(inputs)
    data = {key.removeprefix("data."): values[key] for key in sorted(affecting) if key.startswith("data.")}
    vocabulary = sha256(json.dumps(source.vocabulary.to_json(), sort_keys=True).encode()).hexdigest()
    content = {"data.sha256": source.sha256, "data.vocabulary": vocabulary}
    first, *others = world.gather(content | inputs | {"data": data})
    for rank, inputs in enumerate(others, 1):
        if changed := differences(first, inputs):
            # If only secrets differ, name the keys without values.
            changes = ", ".join(
                differences(without_secrets(first), without_secrets(inputs)) or (c.split(":")[0] for c in changed)
            )
            raise UserError(
                f"process {rank} has other settings or data than process 0: {changes}: start all nodes with the same "
                f"overrides and the same data"
            )
