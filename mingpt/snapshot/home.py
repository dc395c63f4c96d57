"""Where a run lives: in a place that all processes see, or on the disk of one node, which then has rank 0.

Found out at each start, before ranks are given, and not by guessing from a path: one process of each node writes a file
with a random name into the run's folder, and all look which of these files they see. (Such a name was never looked up
before, so no cache of a file system can know that it is not there.) Since no bit depends on ranks, the node that has
the run can always come first.
"""

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import TypeAdapter

from mingpt.config.schema import Config
from mingpt.console import printable
from mingpt.errors import TransientError, UserError
from mingpt.folder import Folder
from mingpt.snapshot import hot
from mingpt.snapshot.attempts import make_run_dir, newest_number
from mingpt.snapshot.elsewhere import Marker, read_marker
from mingpt.snapshot.store import PROBE, Store
from mingpt.world.env import Env

Gather = Callable[[Any], list[Any]]  # a JSON value of every process, by rank


@dataclass(frozen=True)
class Home:
    """run, snapshots: the ranks that see run.dir and snapshot.dir as rank 0 does.

    host: rank 0's, if there are processes that do not see run.dir; else "".
    """

    run: Sequence[int]
    snapshots: Sequence[int]
    host: str = ""


@dataclass(frozen=True)
class Held:
    """What a node has of a run. run: its id. attempt, step: its newest ones."""

    run: str | None
    attempt: int
    step: int


@dataclass(frozen=True)
class Told:
    """What a process tells the others at a start.

    node: equal for the processes of a node. head: whether the platform calls that node its first. writes: whether it
    can write into both places, for its node. why_not: why it can't. problem: why it can't read them. sees_run,
    sees_snapshots: the processes whose files it sees there. held, marker: what its node has, if it writes for it.
    in_memory: the folder and the newest step of hot snapshots that its node keeps of the marker's run.
    """

    host: str
    node: str
    head: bool
    writes: bool
    why_not: str = ""
    problem: str = ""
    sees_run: Sequence[int] = ()
    sees_snapshots: Sequence[int] = ()
    held: Held | None = None
    marker: Marker | None = None
    in_memory: tuple[str, int] | None = None


TOLD = TypeAdapter(Told)


@dataclass
class HomeSearch:
    """Finds out where the run of `config` lives. home: set by `settle`."""

    config: Config
    home: Home = field(default_factory=lambda: Home((0,), (0,)))

    def settle(self, gather: Gather) -> list[int]:
        """Return the order in which the processes get their ranks: the present rank of each. Called by all processes.

        Raises UserError in all of them, after all have told what they see. Nothing is left in the folders but what was
        there.
        """
        env = Env.read()
        run, snapshots = Folder(self.config.run.dir), Store(self.config.snapshot.dir)
        # A probe in run.dir tells of a snapshot.dir below it, too.
        inside = self.config.snapshot.dir.startswith(self.config.run.dir.rstrip("/") + "/")
        places = [place for place in (run, *([] if inside else [snapshots])) if place.local]
        probe, why_not, made = f"{PROBE}{uuid4().hex}", "", list[str]()
        several = env.size > 1 and env.local_size != env.size
        if several and places and env.local_rank == 0:
            made = [place.root for place in places if not os.path.exists(place.root)]
            try:
                for place in places:
                    make_run_dir(place.url)
                    Path(place.path(probe)).touch(exist_ok=False)
            except (UserError, TransientError, OSError) as error:
                why_not = str(error)
        probes = gather(probe if several and places and env.local_rank == 0 and not why_not else None)

        def seen(place: Folder) -> list[int]:
            if not (several and place.local):
                return [*range(env.size)]
            return [r for r, name in enumerate(probes) if name and os.path.exists(place.path(name))]

        sees_run = seen(run)
        sees_snapshots = sees_run if inside else seen(snapshots)
        told = Told(
            socket.gethostname(), env.node, env.head, env.local_rank == 0 and not why_not, why_not,
            sees_run=sees_run, sees_snapshots=sees_snapshots,
            **(self._found() if run.local and env.local_rank == 0 else {}),
        )  # fmt: skip
        everyone = [TOLD.validate_python(one) for one in gather(asdict(told))]
        with suppress(OSError):  # all have looked
            for place in places:
                Path(place.path(probe)).unlink(missing_ok=True)
            for root in made:  # a start that is refused leaves no folder
                Path(root).rmdir()
        order, self.home = choose(everyone, run.shown, self.config.resume.anew)
        return order

    def _found(self) -> dict[str, Any]:
        """What this node has of the run, and its marker."""
        run_dir = self.config.run.dir
        try:
            marker, attempt = read_marker(run_dir), newest_number(run_dir)
            steps = Store(self.config.snapshot.dir).steps() if Folder(self.config.snapshot.dir).local else []
            held = Held(hot.find_run_id(run_dir), attempt, max(steps, default=0)) if attempt or steps else None
            return {"held": held, "marker": marker, "in_memory": self._in_memory(marker) if marker else None}
        except (UserError, TransientError) as error:  # told after the others have told theirs
            return {"problem": str(error)}

    def _in_memory(self, marker: Marker) -> tuple[str, int] | None:
        own = hot.folder(self.config.snapshot.hot_dir, self.config.run.dir, marker.run)
        steps = Store(str(own), "snapshot.hot_dir").steps() if own.is_dir() else []
        return (str(own), max(steps)) if steps else None


def choose(told: Sequence[Told], shown: str, anew: bool) -> tuple[list[int], Home]:
    """The order of ranks, by present rank, and where the run lives, in ranks of that order.

    told: of every process, by present rank. shown: run.dir for messages. anew: resume.anew. Raises UserError if two
    nodes hold different runs, and if the node that holds this one is missing.
    """
    if problem := next((one.problem for one in told if one.problem), ""):
        raise UserError(problem, everywhere=True)
    everyone = [*range(len(told))]
    writers = [rank for rank in everyone if told[rank].writes]
    blocked = (one.why_not for one in told if one.why_not and (not writers or (one.held and not one.sees_run)))
    if why_not := next(blocked, ""):  # what has the run but can't be written must not be passed over for a second run
        raise UserError(why_not, everywhere=True)
    held = {rank: own for rank in writers if (own := told[rank].held)}
    # By id, then the newest attempt, then the newest step: after a rewind a higher step may be a stale one.
    holder = max(held, key=lambda r: (held[r].attempt, held[r].step, told[r].head, -r), default=None)
    # One without attempts may only see the holder's snapshots, in a folder that both share.
    apart = (r for r, own in held.items() if own.attempt or holder not in told[r].sees_snapshots)
    if holder is not None and (other := next((r for r in apart if held[r].run != held[holder].run), None)) is not None:
        raise UserError(_two_runs(told, held, holder, other, shown), everywhere=True)
    if not anew and (missing := _missing(told, held[holder] if holder is not None else None)):
        raise UserError(_not_here(told, missing, shown), everywhere=True)
    home = holder if holder is not None else _head(told, writers)
    sees_run = [rank for rank in everyone if home in told[rank].sees_run]
    sees_snapshots = {rank for rank in everyone if home in told[rank].sees_snapshots}
    if len(sees_run) == len(told):
        if len(sees_snapshots) < len(told):
            raise UserError(
                f"{shown} is shared by all nodes, and snapshot.dir is not: leave snapshot.dir out, or give a bucket or "
                f"a folder that all nodes share",
                everywhere=True,
            )
        return everyone, Home(everyone, everyone)
    first = {one.node: rank for rank, one in reversed([*enumerate(told)])}
    order = sorted(everyone, key=lambda rank: (rank not in sees_run, first[told[rank].node], rank))
    return order, Home(
        [new for new, rank in enumerate(order) if rank in sees_run],
        [new for new, rank in enumerate(order) if rank in sees_snapshots],
        told[order[0]].host,
    )


def _head(told: Sequence[Told], writers: Sequence[int]) -> int:
    """The first process that can write on the platform's first node, else on that of rank 0, else anywhere."""
    head = next((one.node for one in told if one.head), told[0].node)
    return next((rank for rank in writers if told[rank].node == head), writers[0])


def _missing(told: Sequence[Told], held: Held | None) -> Marker | None:
    """The newest marker of a run, or of attempts of this run, that no node here holds."""
    markers = [one.marker for one in told if one.marker]
    if held:
        markers = [m for m in markers if m.run != held.run or m.attempt > held.attempt]
    return max(markers, key=lambda marker: marker.attempt, default=None)


def _two_runs(told: Sequence[Told], held: dict[int, Held], holder: int, other: int, shown: str) -> str:
    runs = " and ".join(
        f"{printable(told[r].host)} has one (attempt {held[r].attempt}, step {held[r].step})"
        for r in sorted((holder, other))
    )
    return (
        f"{shown}: {runs}, and these are different runs under one name: move one of the folders away, or give this run "
        f"another run.name"
    )


def _not_here(told: Sequence[Told], marker: Marker, shown: str) -> str:
    where = printable(marker.host)
    gone = "its folder is not there any more" if marker.host in {one.host for one in told} else ""
    text = (
        f"{shown}: this run is on {where}'s disk (step {marker.step} when last seen), and "
        f"{gone or 'that machine is not among these nodes'}: start again with it; or copy its folder to one of these "
        f"nodes; or give another run.name; or begin anew with resume.anew=true"
    )
    kept = {one.in_memory: one.host for one in told if one.in_memory and one.marker and one.marker.run == marker.run}
    for (folder, step), host in kept.items():
        text += (
            f". {printable(host)} keeps step {step} in its memory, in {folder}: copied into snapshot.dir, a start with "
            f"resume.anew=true goes on from it"
        )
    return text
