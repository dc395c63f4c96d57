"""The runs in a folder, as a table: in which settings they differ, and how each one went."""

from collections.abc import Mapping, Sequence
from typing import Any

from mingpt.config.configfile import read_config
from mingpt.config.keys import leaves
from mingpt.config.stored import is_below
from mingpt.console import columns, complain
from mingpt.errors import OF_ONE
from mingpt.folder import Folder
from mingpt.history.history import History
from mingpt.redact import as_lines, without_secrets

OWN = ("run", "snapshot.dir")  # what differs between any two runs
COLUMNS = ("state", "step", "loss", "val_loss")


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
    """A row for each run of a folder, the lowest validation loss first."""
    known = {name: dict(leaves(without_secrets(config))) for name, config in runs_in(folder).items()}
    keys = dict.fromkeys(key for values in known.values() for key in values if not is_below(key, OWN))
    differ = [key for key in keys if len({str(values.get(key)) for values in known.values()}) > 1]
    found = [
        {"run": name} | {key: values.get(key) for key in differ} | _went(f"{folder.rstrip('/')}/{name}")
        for name, values in known.items()
    ]
    return sorted(found, key=lambda r: r["val_loss"] if isinstance(r["val_loss"], (int, float)) else float("inf"))


def _went(run_dir: str) -> dict[str, Any]:
    try:
        past = History(run_dir)
        booked = past.accounts
        state = (booked[-1].end or "running, or killed") if booked else "not started"
        step = max((account.step for account in booked), default=0)
        return {"state": state, "step": step} | {key: past.last_of(key) for key in ("loss", "val_loss")}
    except OF_ONE as error:
        complain(str(error))
        return {"state": "can't be read"} | dict.fromkeys(COLUMNS[1:])


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """For a terminal or a log."""
    names = dict.fromkeys(key for row in found for key in row)
    return as_lines(columns([[*names], *([_cell(row.get(name)) for name in names] for row in found)]))


def _cell(value: object) -> str:
    return "–" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
