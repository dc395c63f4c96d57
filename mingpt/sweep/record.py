"""What a sweep's folder says: sweep.json names the trials; how each one went is in its own run."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, field, replace
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from mingpt.config.schema import Config
from mingpt.config.stored import is_within
from mingpt.errors import UserError
from mingpt.folder import Folder
from mingpt.observe.jsonl import read_metrics
from mingpt.observe.ledger import accounts
from mingpt.redact import as_lines, without_secrets
from mingpt.snapshot.store import Store
from mingpt.sweep.expand import Trial

NAME = "sweep.json"
LARGEST = 1 << 24  # bytes of it that are read
COLUMNS = ("state", "step", "loss", "val_loss")


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Entry:
    """A trial as sweep.json has it. pruned: it was stopped since it was worse than others, and stays so."""

    values: dict[str, str]
    overrides: list[str]
    max_steps: int
    snapshots: str
    pruned: bool = field(default=False, compare=False)


def entry_of(trial: Trial, config: Config) -> Entry:
    """What is stored has no secrets."""
    overrides = [str(without_secrets(text)) for text in trial.overrides]
    return Entry(dict(trial.values), overrides, config.train.max_steps, str(without_secrets(config.snapshot.dir)))


def read_record(folder: str) -> dict[str, Entry] | None:
    """The trials of a sweep, by name; None if this is no sweep's folder. Anybody may have written it."""
    raw = Folder(folder, "--dir").read(NAME, LARGEST)
    if raw is None:
        return None
    try:
        entries = json.loads(raw).items()
        return {name: Entry(**held) for name, held in entries if name.strip("./") and "/" not in name}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{without_secrets(folder)}/{NAME} can't be read: delete it, and run the sweep") from error


def write_record(folder: str, entries: Mapping[str, Entry]) -> None:
    text = json.dumps({name: asdict(entry) for name, entry in entries.items()}, indent=1)
    Folder(folder, "--dir").write(NAME, text.encode())


def has_finished(entry: Entry) -> bool:
    """Whether the run has a snapshot of its last step, which each finished run has."""
    steps = Store(entry.snapshots).steps()
    return bool(steps) and steps[0] >= entry.max_steps


def note(folder: str, now: Mapping[str, Entry]) -> set[str]:
    """Note trials. Returns the names of those that need no more training: they have finished, or were pruned.

    One whose overrides have changed is trained: its resume tells what it refuses.
    """
    before = read_record(folder) or {}
    same = {name: before[name] for name, entry in now.items() if before.get(name) == entry}
    if len(same) < len(now):
        write_record(folder, {**before, **now, **same})
    return {name for name, entry in same.items() if entry.pruned or has_finished(entry)}


def note_pruned(folder: str, name: str) -> None:
    known = read_record(folder) or {}
    write_record(folder, known | {name: replace(known[name], pruned=True)})


def last_of(metrics: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next((line[key] for line in reversed(metrics) if key in line), None)


def row(folder: str, entry: Entry) -> dict[str, Any]:
    """How a trial went, from what its run has written in its folder. Other places may be a stranger's to name."""
    metrics, booked = read_metrics(folder), accounts(folder)
    step = max([line["step"] for line in metrics] + [account.step for account in booked], default=0)
    if is_within(entry.snapshots, folder) and has_finished(entry):
        state = "finished"
    elif entry.pruned:
        state = "pruned"
    elif not booked:
        state = "not started"
    else:
        state = booked[-1].end or "running, or killed"
    losses = {key: last_of(metrics, key) for key in ("loss", "val_loss")}
    return {**entry.values, "state": state, "step": step, **losses}


def rows(folder: str, entries: Mapping[str, Entry]) -> list[dict[str, Any]]:
    """Those of all trials, the lowest validation loss first."""
    found = [{"trial": name, **row(f"{folder.rstrip('/')}/{name}", entry)} for name, entry in entries.items()]
    return sorted(found, key=lambda r: r["val_loss"] if isinstance(r["val_loss"], (int, float)) else float("inf"))


def columns(found: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for row in found for key in row if key not in ("trial", *COLUMNS))
    return [*keys, *COLUMNS]


def cell(value: object) -> str:
    return "–" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """For a terminal or a log."""
    names = columns(found)
    lines: list[list[str]] = [names, *([cell(row.get(name)) for name in names] for row in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return as_lines(_line(line, widths) for line in lines)


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    return "  ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)).rstrip()
