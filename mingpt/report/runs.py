"""The runs in a folder with the settings in which they differ."""

from typing import Any

from mingpt.compose.stored import is_below
from mingpt.config.keys import leaves
from mingpt.report.listing import rows as listed

OWN = ("run", "snapshot.dir")  # what differs between any two runs


def rows(folder: str) -> list[dict[str, Any]]:
    """A row for each run of a folder, the newest first. Of the settings, those that all runs have."""
    found = listed(folder)
    known = [dict(leaves(row["config"])) for row in found if row["config"]]
    keys = [key for key in next(iter(known), {}) if not is_below(key, OWN)]
    shared = [key for key in keys if all(key in values for values in known)]
    differ = [key for key in shared if len({str(values[key]) for values in known}) > 1]
    return [row | {key: dict(leaves(row["config"])).get(key) for key in differ} for row in found]


def best_first(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By validation loss."""
    return sorted(found, key=lambda r: r["val_loss"] if isinstance(r["val_loss"], (int, float)) else float("inf"))
