"""Where a run lives: in a place that all processes see, or on the disk of one node, which then has rank 0.

Found out at each start, before ranks are given, and not by guessing from a path: one process of each node writes a file
with a random name into the run's folder, and all look which of these files they see. (Such a name was never looked up
before, so no cache of a file system can know that it is not there.) Since no bit depends on ranks, the node that has
the run can always come first.
"""

import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import TypeAdapter

from mingpt.cli.console import printable
from mingpt.config.schema import Config
from mingpt.errors import TransientError, UserError
from mingpt.files.folder import Folder
from mingpt.snapshot.attempts import make_run_dir, newest_number
from mingpt.snapshot.elsewhere import Marker, read_marker
from mingpt.snapshot.store import PROBE, Store
from mingpt.tiers import hot
from mingpt.world.env import Env
from mingpt.world.world import Gather


@dataclass(frozen=True)
class Home:
    """Where the run lives, in the ranks of this attempt."""

    # The ranks that see run.dir, and snapshot.dir, as rank 0 does.
    run: Sequence[int]
    snapshots: Sequence[int]
    # Rank 0's host, if there are processes that do not see run.dir; else "".
    host: str = ""


@dataclass(frozen=True)
class Held:
    """What a node has of a run: the run's id, its newest attempt and its newest step."""

    run: str | None
    attempt: int
    step: int


@dataclass(frozen=True)
class Trouble:
    """Why a node can't use run.dir or snapshot.dir. Travels as JSON, so that all processes end with one exit code."""

    reason: str
    # Whether the next start may work as it is (exit code 70), or the user must act (64).
    may_pass: bool

    @classmethod
    def of(cls, error: UserError | TransientError) -> "Trouble":
        return cls(str(error), isinstance(error, TransientError))


@dataclass(frozen=True)
class Sighting:
    """What one process sees of the run's places at a start, for all others."""

    host: str
    # Equal for the processes of a node. head: whether the platform calls that node its first.
    node: str
    head: bool
    # Whether this process has written a probe, for its node, into both places; if it could not, why.
    writes: bool
    why_not: Trouble | None = None
    # The processes whose probes it sees in run.dir and in snapshot.dir.
    sees_run: Sequence[int] = ()
    sees_snapshots: Sequence[int] = ()
    # Of the process that looks for its node: what the node has of the run, its marker, or why it can't read them.
    held: Held | None = None
    marker: Marker | None = None
    problem: Trouble | None = None
    # The folder and the newest step of hot snapshots that the node keeps of the marker's run.
    in_memory: tuple[str, int] | None = None


SIGHTING = TypeAdapter(Sighting)


class _Probe:
    """A file with a random name in each of the places. Nothing stays but what was there before."""

    def __init__(self, places: Sequence[Folder]) -> None:
        self.places = places
        self.name = f"{PROBE}{uuid4().hex}"
        self.why_not: Trouble | None = None
        self._made: list[Path] = []  # folders, each after those that it is in

    def write(self) -> None:
        try:
            for place in self.places:
                root = Path(place.root)
                missing = [folder for folder in (root, *root.parents) if not folder.exists()]
                self._made += reversed(missing)  # before they are made: that may fail half way
                make_run_dir(place.url)
                with place.named_errors():
                    Path(place.path(self.name)).touch(exist_ok=False)
        except (UserError, TransientError) as error:
            self.why_not = Trouble.of(error)

    def unlink(self) -> None:
        for place in self.places:
            with suppress(OSError):  # it was never written, or the disk fails now: the run itself will tell
                os.unlink(place.path(self.name))

    def clear(self) -> None:
        """Remove the files, and the folders that were made for them: a start that is refused leaves nothing."""
        self.unlink()
        for folder in reversed(self._made):
            # rmdir, since somebody may have put something there meanwhile. Then it fails, and the folder stays.
            with suppress(OSError):
                folder.rmdir()


@dataclass
class HomeSearch:
    """Finds out where the run of `config` lives. home: set by `settle`."""

    config: Config
    home: Home = field(default_factory=lambda: Home((0,), (0,)))

    def settle(self, gather: Gather) -> list[int]:
        """Return the order in which the processes get their ranks: the present rank of each. Called by all processes.

        Raises UserError or TransientError in all of them, after all have told what they see. Nothing is left in the
        folders but what was there.
        """
        try:
            run, snapshots = Folder(self.config.run.dir), Store(self.config.snapshot.dir)
        except (UserError, TransientError) as error:  # a store's package is missing on this node, for instance
            # Told in the same turns as below: the others wait for this process, and take what comes in their order.
            gather(None)
            env = Env.read()
            unable = Sighting(socket.gethostname(), env.node, env.head, False, problem=Trouble.of(error))
            sightings = _gathered(gather, unable)
            gather(None)
            _raise_first(one.problem for one in sightings)
            raise  # never reached: this process's own is among them
        # A probe in run.dir tells of a snapshot.dir below it, too.
        inside = self.config.snapshot.dir.startswith(self.config.run.dir.rstrip("/") + "/")
        probe = _Probe([place for place in ([run] if inside else [run, snapshots]) if place.local])
        try:
            sightings = self._look(gather, probe, run, run if inside else snapshots)
            # On a disk that nodes share, the one that has made the folder can remove it when the last probe is gone.
            probe.unlink()
            gather(None)
        finally:  # also if another process never comes, so that this one waits in vain
            probe.clear()
        order, self.home = choose(sightings, run.shown, self.config.resume.anew)
        return order

    def _look(self, gather: Gather, probe: _Probe, run: Folder, snapshots: Folder) -> list[Sighting]:
        """What each process sees, by rank."""
        env = Env.read()
        several = env.size > 1 and env.local_size != env.size  # nodes: processes of one see the same disk
        first = env.local_rank == 0
        probing = several and first and bool(probe.places)
        if probing:
            probe.write()
        probes = gather(probe.name if probing and not probe.why_not else None)

        def seen(place: Folder) -> list[int]:
            if not (several and place.local):
                return [*range(env.size)]
            return [rank for rank, name in enumerate(probes) if name and os.path.exists(place.path(name))]

        sighting = Sighting(
            socket.gethostname(), env.node, env.head, first and not probe.why_not, probe.why_not,
            sees_run=seen(run), sees_snapshots=seen(snapshots),
            **(self._of_node() if run.local and first else {}),
        )  # fmt: skip
        return _gathered(gather, sighting)

    def _of_node(self) -> dict[str, Any]:
        """The fields of a Sighting that hold for a whole node."""
        run_dir, store = self.config.run.dir, Store(self.config.snapshot.dir)
        root = Path(Folder(run_dir).root)
        if root.exists() and not root.is_dir():
            return {}  # make_run_dir says so, by the key that the user has given
        try:
            marker, attempt = read_marker(run_dir), newest_number(run_dir)
            steps = store.steps() if store.local else []
            held = Held(hot.find_run_id(run_dir), attempt, max(steps, default=0)) if attempt or steps else None
            return {"held": held, "marker": marker, "in_memory": self._in_memory(marker) if marker else None}
        except (UserError, TransientError) as error:
            # Not raised here: the others wait for this process, and would end much later, for another reason.
            return {"problem": Trouble.of(error)}

    def _in_memory(self, marker: Marker) -> tuple[str, int] | None:
        memory = hot.find_hot(self.config.snapshot.hot_dir, self.config.run.dir, marker.run)
        return (memory.root, max(memory.steps())) if memory and memory.steps() else None


def _gathered(gather: Gather, own: Sighting) -> list[Sighting]:
    """What all processes have seen, by rank. own: what this one tells."""
    return [SIGHTING.validate_python(one) for one in gather(asdict(own))]


def choose(sightings: Sequence[Sighting], shown: str, anew: bool) -> tuple[list[int], Home]:
    """The order of ranks, by present rank, and where the run lives, in ranks of that order.

    sightings: of every process, by present rank. shown: run.dir for messages. anew: resume.anew. Raises UserError if
    two nodes hold different runs, if the node that holds this one is missing, or as a node's Trouble says.
    """
    _raise_first(one.problem for one in sightings)
    writers = [rank for rank, one in enumerate(sightings) if one.writes]
    # A disk that has the run but can't be written must not be passed over: a second run would begin on another one.
    needed = [one for one in sightings if not writers or (one.held and not one.sees_run)]
    _raise_first(one.why_not for one in needed)
    holder = _holder(sightings, writers, shown)
    if not anew and (missing := _missing(sightings, None if holder is None else sightings[holder].held)):
        raise UserError(_not_here(sightings, missing, shown))
    home = _head(sightings, writers) if holder is None else holder
    everyone = [*range(len(sightings))]
    sees_run = [rank for rank in everyone if home in sightings[rank].sees_run]
    sees_snapshots = [rank for rank in everyone if home in sightings[rank].sees_snapshots]
    if sees_run == everyone:
        if sees_snapshots != everyone:
            raise UserError(
                f"{shown} is shared by all nodes, and snapshot.dir is not: leave snapshot.dir out, or give a bucket or "
                f"a folder that all nodes share"
            )
        return everyone, Home(everyone, everyone)
    lowest = dict[str, int]()  # rank of each node
    for rank in everyone:
        lowest.setdefault(sightings[rank].node, rank)
    # Whole nodes are moved, and local order is kept: sums travel in two hops, inside a node first. A node that sees the
    # run and can't write there comes after one that can, since rank 0 writes.
    at_home = sightings[home].node
    order = sorted(
        everyone,
        key=lambda rank: (
            rank not in sees_run,
            sightings[rank].node != at_home,
            lowest[sightings[rank].node],
            rank,
        ),
    )
    nodes_that_write = {sightings[rank].node for rank in writers}
    return order, Home(
        [*range(len(sees_run))],
        sorted(order.index(rank) for rank in sees_snapshots if sightings[rank].node in nodes_that_write),
        sightings[order[0]].host,
    )


def _raise_first(troubles: Iterable[Trouble | None]) -> None:
    """Raise the first trouble that lasts, else the first: a new start would meet the one that lasts again."""
    for trouble in sorted(filter(None, troubles), key=lambda trouble: trouble.may_pass):
        raise (TransientError if trouble.may_pass else UserError)(trouble.reason)


def _holder(sightings: Sequence[Sighting], writers: Sequence[int], shown: str) -> int | None:
    """The process whose node has the newest of the run; None: no node has any. Raises UserError for two runs."""
    held = dict[int, Held]()
    for rank in writers:
        if (own := sightings[rank].held) is not None:
            held[rank] = own
    if not held:
        return None
    # The newest attempt, then the newest step: after a rewind a higher step may be a stale one.
    holder = max(held, key=lambda rank: (held[rank].attempt, held[rank].step, sightings[rank].head, -rank))
    for rank, own in held.items():
        # A node without attempts may only see the holder's snapshots, in a folder that both share.
        only_sees = own.attempt == 0 and holder in sightings[rank].sees_snapshots
        if own.run != held[holder].run and not only_sees:
            one, two = (
                f"{printable(sightings[r].host)} has one (attempt {held[r].attempt}, step {held[r].step})"
                for r in sorted((holder, rank))
            )
            raise UserError(
                f"{shown}: {one} and {two}, and these are different runs under one name: move one of the folders away, "
                f"or give this run another run.name"
            )
    return holder


def _head(sightings: Sequence[Sighting], writers: Sequence[int]) -> int:
    """The first process that can write on the platform's first node, else on that of rank 0, else anywhere."""
    head = next((one.node for one in sightings if one.head), sightings[0].node)
    return next((rank for rank in writers if sightings[rank].node == head), writers[0])


def _missing(sightings: Sequence[Sighting], held: Held | None) -> Marker | None:
    """The newest marker of a run, or of attempts of this run, that no node here holds."""
    markers = list[Marker]()
    for one in sightings:
        # A copy of the folder may have been brought here, and an older copy is not the run.
        if one.marker and not (held and held.run == one.marker.run and held.attempt >= one.marker.attempt):
            markers.append(one.marker)
    return max(markers, key=lambda marker: marker.attempt, default=None)


def _not_here(sightings: Sequence[Sighting], marker: Marker, shown: str) -> str:
    # The machine may be here under its old name, with a new and empty disk: only the folder is known to be missing.
    text = (
        f"{shown}: {marker.words}, and none of these nodes has its folder: start again with that machine and that "
        f"disk; or copy its folder to one of these nodes; or give another run.name; or begin anew with "
        f"resume.anew=true"
    )
    kept = dict[tuple[str, int], str]()  # of nodes that keep the same step under the same path, one is enough
    for one in sightings:
        if one.in_memory and one.marker and one.marker.run == marker.run:
            kept[one.in_memory] = one.host
    for (folder, step), host in kept.items():
        text += (
            f". {printable(host)} keeps step {step} in its memory, in {folder}: copied into snapshot.dir, a start with "
            f"resume.anew=true goes on from it"
        )
    return text
