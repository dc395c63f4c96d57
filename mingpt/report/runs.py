"""The runs in a folder as one table, which `mingpt report`, `log` and `snapshots list` share.

`report` adds the settings in which they differ. Anybody may have made these runs: nothing in them is believed.
"""

import math
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from shutil import get_terminal_size
from typing import Any

from mingpt.cli.console import as_lines, columns, complain, shortened
from mingpt.compose.stored import is_below
from mingpt.config.configfile import read_config
from mingpt.config.keys import KINDS, SECTIONS, Raw, default, leaves, named, schema_of
from mingpt.errors import OF_ONE
from mingpt.files.folder import Folder
from mingpt.history.history import NOTHING
from mingpt.report.reading import Run
from mingpt.snapshot.store import SNAPSHOTS

Row = dict[str, Any]
OWN = ("run", "snapshot.dir")  # settings that differ between any two runs
COLUMNS = ("run", "state", "date (UTC)", "model", "step", "loss", "val_loss", "val_share")
INNER = ("val_tokens", "config", "of")  # what a row has, too, and no column shows
NOT_STARTED, UNREADABLE = "not started", "can't be read"  # the states of runs that have no figures
WIDTH = 120  # characters of a line where there is no terminal
LONGEST = 40  # characters of a state: of a run that failed it begins the reason
OTHER_PARTS = (
    "WARNING: these validation losses can't be compared: they were measured on other parts of the split (val_share, or "
    "other data; –: not recorded). `mingpt evaluate RUN` takes all of it."
)


def rows(folder: str) -> list[Row]:
    """The rows of `listed`, with the settings in which the runs differ."""
    return with_settings(listed(folder))


def with_settings(found: list[Row]) -> list[Row]:
    """The rows, each with its values of the keys that `differing` names."""
    keys = differing([row["config"] for row in found if row["config"]])
    compared = list[Row]()
    for row in found:
        values = dict(leaves(row["config"]))  # once for all keys: a folder may hold hundreds of runs
        compared.append(row | {key: values.get(key) for key in keys})
    return compared


def best_first(found: list[Row]) -> list[Row]:
    """By validation loss."""
    return sorted(found, key=lambda r: r["val_loss"] if isinstance(r["val_loss"], (int, float)) else float("inf"))


def listed(folder: str) -> list[Row]:
    """A row for each run that lies directly in a folder, the newest first."""
    # A run's own folder of snapshots would stand for that run, and has no others in it.
    names = [name for name in Folder(folder, "DIR").subfolders() if name != SNAPSHOTS]
    found = [row for name in names if (row := _row(folder.rstrip("/"), name))]
    return sorted(found, key=lambda row: row["date (UTC)"] or "", reverse=True)


def runs_of(found: list[Row]) -> list[Run]:
    """Those that have figures."""
    return [row["of"] for row in found if row["of"]]


def _row(folder: str, name: str) -> Row | None:
    """None: no run is there. What can't be read is named in a line, so that the others are shown."""
    url = f"{folder}/{name}"
    try:
        return went(Run(url))
    except OF_ONE as error:
        row = dict.fromkeys((*COLUMNS, *INNER)) | {"run": name, "step": 0}
        if NOTHING in str(error):
            config = read_config(url)
            return row | {"state": NOT_STARTED, "config": config} if config else None
        complain(str(error))
        return row | {"state": UNREADABLE, "config": {}}


def went(run: Run) -> Row:
    """How a run went, along the line of attempts that it is on. config: plain. of: the Run; None: it has no figures."""
    noted = [at for a in run.attempts for at in (a.started, a.until) if math.isfinite(at)]
    model = [dict(leaves(run.settings)).get("model.kind"), run.parameters and f"{run.parameters / 1e6:,.1f} M"]
    ended = run.attempts[-1].end if run.attempts else None
    tokens, share = run.past.validated_on
    return {
        "run": run.folder,
        "state": shortened(ended or "", LONGEST),
        # A forged time must not put a run above all others for ever.
        "date (UTC)": moment(min(max(noted), time.time()))[:16] if noted else None,
        "model": " ".join(str(part) for part in model if part),
        "step": run.last_step,
        "loss": run.past.last_of("loss"),
        "val_loss": run.past.last_of("val_loss"),
        "val_share": share,
        "val_tokens": tokens,
        "config": run.settings,
        "of": run,
    }


def moment(at: float) -> str:
    """A time of day in UTC, to the second; empty if it is unknown, or in no year."""
    try:
        return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return ""


def table(found: list[Row]) -> str:
    """For a terminal or a log. What rows have besides the columns stands behind them, or below if it does not fit."""
    width, every = get_terminal_size((WIDTH, 0)).columns, [*zip(*cells(found), strict=True)]
    blocks = [every[: len(COLUMNS)]]
    for column in every[len(COLUMNS) :]:
        if sum(max(map(len, other)) + 2 for other in [*blocks[-1], column]) - 2 > width:
            blocks.append(every[:1])
        blocks[-1].append(column)
    lines = [line for block in blocks for line in ("", *columns([*zip(*block, strict=True)]))]
    return as_lines([*lines[1:], *([OTHER_PARTS] if measured_apart(found) else [])])


def cells(found: list[Row]) -> list[list[str]]:
    """The names of the columns, then each row."""
    names = [name for name in found[0] if name not in INNER]
    return [names, *([_cell(row[name]) for name in names] for row in found)]


def measured_apart(found: list[Row]) -> bool:
    """Whether the validation losses of these rows were measured on different parts of a split."""
    return len({(row["val_tokens"], row["val_share"]) for row in found if row["val_loss"] is not None}) > 1


def _cell(value: object) -> str:
    return "–" if value in (None, "") else f"{value:.6g}" if isinstance(value, float) else str(value)


def with_defaults(config: Raw) -> Iterator[tuple[str, Any, Any]]:
    """(key, value, default) of each setting; the default of a key that no schema knows is None."""
    for key, value in leaves(config):
        section, _, name = key.rpartition(".")
        fields = named(schema_of(section, config)) if section in ("", *SECTIONS, *KINDS) else {}
        usual = default(fields[name], config) if name in fields else None
        if name == "kind" and section in KINDS:  # each kind has its own name as the default
            usual = next(iter(KINDS[section]))
        yield key, value, usual


def differing(configs: Sequence[Raw]) -> list[str]:
    """The keys in which runs differ, of those that all of them have: another kind of model lacks many.

    Left out is a key that has its default in all runs, such as one that follows another key: it tells nothing new.
    """
    values, found = [dict(leaves(config)) for config in configs], list[str]()
    chosen = {key for config in configs for key, value, usual in with_defaults(config) if value != usual}
    for key in next(iter(values), {}):
        everywhere = all(key in of_run for of_run in values)
        if everywhere and key in chosen and not is_below(key, OWN) and len({str(of_run[key]) for of_run in values}) > 1:
            found.append(key)
    return found
