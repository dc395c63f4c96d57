"""The marker of a run that lives on another node's disk: `<run.dir>/elsewhere.json`, all that this node has of the run.

Without it, a start without the node that has the run would find nothing here and silently begin a second one.
"""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from mingpt.cli.console import complain, printable
from mingpt.errors import UserError
from mingpt.files.folder import Folder
from mingpt.snapshot.attempts import Count, newest_number

ELSEWHERE, LONGEST = "elsewhere.json", 4096  # its bytes


@dataclass(frozen=True)
class Marker:
    """Where a run is."""

    run: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]  # its id
    host: str  # whose disk has it
    # Its newest attempt and committed step, when last seen. This node's launcher counts such a step as progress.
    attempt: Count
    step: Count

    @property
    def words(self) -> str:
        """For messages."""
        return f"this run is on {printable(self.host)}'s disk (step {self.step} when last seen)"

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


def look_elsewhere(run_dir: str, newest: int | None) -> None:
    """Say that a run is on another node's disk, and what is here of it is older. newest: the newest step here.

    Raises UserError with newest=None: nothing of it is here.
    """
    marker = read_marker(run_dir)
    if marker is None:
        return
    cure = f"{marker.words}: give this command on that machine, or copy the folder from there"
    if newest is None:
        raise UserError(f"{run_dir}: {cure}")
    # The attempt first: after a rewind the newest step is a lower one.
    if marker.attempt > newest_number(run_dir) or marker.step > newest:
        _complain_once(f"{run_dir}: what is here is older: {cure}")


@cache
def _complain_once(text: str) -> None:
    """Most verbs look at a folder more than once."""
    complain(text)


def remove_marker(run_dir: str) -> None:
    """The run is here now. Raises OSError."""
    folder = Folder(run_dir)
    if folder.local:  # in a bucket there never is one
        Path(folder.path(ELSEWHERE)).unlink(missing_ok=True)
