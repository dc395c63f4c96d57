"""The runs in a folder, as a table: in which settings they differ, and how each one went."""

from collections.abc import Mapping, Sequence
from typing import Any

from mingpt.cli.console import as_lines, columns, complain
from mingpt.config.configfile import read_config
from mingpt.config.keys import leaves
from mingpt.errors import OF_ONE
from mingpt.files.folder import Folder
from mingpt.history.history import NOTHING
from mingpt.report.reading import Run
from mingpt.report.settings import differing

COLUMNS = ("state", "step", "loss", "val_loss", "val_tokens", "val_share")
NOT_STARTED, UNREADABLE = "not started", "can't be read"  # the states of runs that have no figures
OTHER_PARTS = (
    "WARNING: these validation losses can't be compared: they were measured on other parts of the split (val_tokens, "
    "val_share; –: not recorded). `mingpt evaluate RUN` takes all of it."
)


def runs_in(folder: str) -> dict[str, dict[str, Any]]:
    """The config of each run that lies directly in a folder, by its name; anybody may have written it."""
    found = dict[str, dict[str, Any]]()
    for name in Folder(folder, "DIR").subfolders():
        try:
            if config := read_config(f"{folder.rstrip('/')}/{name}"):
                found[name] = config
        except OF_ONE as error:
            complain(str(error))
    return found


def rows(folder: str) -> list[dict[str, Any]]:
    """A row for each run of a folder, the lowest validation loss first; with the settings that `differing` names."""
    configs = runs_in(folder)
    keys, found = differing([*configs.values()]), list[dict[str, Any]]()
    for name, config in configs.items():
        values = dict(leaves(config))
        found.append({"run": name} | _went(f"{folder.rstrip('/')}/{name}") | {key: values[key] for key in keys})
    return sorted(found, key=lambda r: r["val_loss"] if isinstance(r["val_loss"], (int, float)) else float("inf"))


def _went(run_dir: str) -> dict[str, Any]:
    try:
        return went(Run(run_dir))
    except OF_ONE as error:
        state = NOT_STARTED if NOTHING in str(error) else UNREADABLE
        if state == UNREADABLE:
            complain(str(error))
        return dict.fromkeys(COLUMNS) | {"state": state, "step": 0}


def went(run: Run) -> dict[str, Any]:
    """How a run went, along the line of attempts that it is on, by COLUMNS."""
    tokens, share = run.past.validated_on
    losses = {key: run.past.last_of(key) for key in ("loss", "val_loss")}
    ended = run.attempts[-1].end if run.attempts else None
    return {"state": ended, "step": run.last_step, **losses, "val_tokens": tokens, "val_share": share}


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """For a terminal or a log."""
    names = dict.fromkeys(key for row in found for key in row)
    lines = columns([[*names], *([_cell(row.get(name)) for name in names] for row in found)])
    return as_lines([*lines, *([OTHER_PARTS] if measured_apart(found) else [])])


def measured_apart(found: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the validation losses of these rows were measured on different parts of a split."""
    return len({(row["val_tokens"], row["val_share"]) for row in found if row["val_loss"] is not None}) > 1


def _cell(value: object) -> str:
    return "–" if value in (None, "") else f"{value:.6g}" if isinstance(value, float) else str(value)
