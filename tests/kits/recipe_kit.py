"""Helpers for tests of recipes/: what is in them, and the environment that SkyPilot gives them."""

import yaml

from tests.kits.paths_kit import ROOT

TEACHING = ("train", "train-rdzv")  # those with plain torchrun lines
REQUIRED = {"train-spot": {"RUN_DIR": "s3://b"}, "serve": {"RUN_DIR": "s3://b/run"}, "prepare": {"OUT": "s3://b/c d"}}
HEAD, OTHER = "127.0.0.1", "127.0.0.2"
DEFAULT = "experiment=shakespeare_10m"


def recipe(name: str) -> dict[str, object]:
    """What the file recipes/NAME.yaml says."""
    loaded = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def envs(name: str, **changed: object) -> dict[str, str]:
    """The recipe's `envs` as SkyPilot sets them, some changed as `--env` does; and its secrets, empty by default."""
    defaults, secrets = recipe(name)["envs"], recipe(name).get("secrets", {})
    assert isinstance(defaults, dict)
    assert isinstance(secrets, dict)
    given = {**defaults, **{key: value for key, value in secrets.items() if value is not None}, **changed}
    assert None not in given.values()  # SkyPilot refuses to launch
    return {key: str(value) for key, value in given.items()}


def sky_variables(rank: int, gpus: int = 0) -> dict[str, str]:
    """What SkyPilot tells each of two nodes."""
    return {
        "SKYPILOT_NODE_IPS": f"{HEAD}\n{OTHER}",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": str(gpus),
        "SKYPILOT_TASK_ID": "sky-2026-11-21-06-00-00-000000_train_1",
    }
