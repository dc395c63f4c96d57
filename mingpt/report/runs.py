"""The runs in a folder with the settings in which they differ."""

from typing import Any

from mingpt.config.keys import leaves
from mingpt.report.listing import rows as listed
from mingpt.report.settings import differing


def rows(folder: str) -> list[dict[str, Any]]:
    """A row for each run of a folder, the newest first; with the settings that `differing` names."""
    found = listed(folder)
    keys = differing([row["config"] for row in found if row["config"]])
    return [row | {key: dict(leaves(row["config"])).get(key) for key in keys} for row in found]


def best_first(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By validation loss."""
    return sorted(found, key=lambda r: r["val_loss"] if isinstance(r["val_loss"], (int, float)) else float("inf"))
