"""The marker of a run that lives on another node's disk: `<run.dir>/elsewhere.json`, all that this node has of the run.

Without it, a start without the node that has the run would find nothing here and silently begin a second one.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from mingpt.cli.console import printable
from mingpt.errors import UserError
from mingpt.files.folder import Folder
from mingpt.snapshot.attempts import Count

ELSEWHERE, LONGEST = "elsewhere.json", 4096  # its bytes


@dataclass(frozen=True)
class Marker:
    """Where a run is."""

    run: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]  # its id
    host: str  # whose disk has it
    # Its newest attempt and committed step, when last seen. This node's launcher counts such a step as progress.
    attempt: Count
    step: Count

    def write(self, run_dir: str) -> None:
        """Raises UserError and TransientError, as `Folder.write`."""
        Folder(run_dir).write(ELSEWHERE, json.dumps(asdict(self)).encode())


MARKER = TypeAdapter(Marker)


def read_marker(run_dir: str) -> Marker | None:
    """This node's marker of a run; None without one. Raises UserError for one that can't be read."""
    folder = Folder(run_dir)
    raw = folder.read(ELSEWHERE, LONGEST) if folder.local else None
    if raw is None:
        return None
    try:
        return MARKER.validate_json(raw, strict=True)
    except ValueError as error:
        # Not "no marker": that would begin a second run under the same name.
        raise UserError(
            f"{folder.shown}: {ELSEWHERE} says on which machine this run is, and can't be read: look at it; without "
            f"it, a start may begin a second run"
        ) from error


def refuse_elsewhere(run_dir: str) -> None:
    """Raise UserError if the run is on another node's disk. Called where nothing else of it is here."""
    if marker := read_marker(run_dir):
        raise UserError(
            f"{run_dir}: this run is on {printable(marker.host)}'s disk (step {marker.step} when last "
            f"seen): give this command on that machine, or copy the folder from there"
        )


def remove_marker(run_dir: str) -> None:
    """The run is here now. Raises OSError."""
    folder = Folder(run_dir)
    if folder.local:  # in a bucket there never is one
        Path(folder.path(ELSEWHERE)).unlink(missing_ok=True)
