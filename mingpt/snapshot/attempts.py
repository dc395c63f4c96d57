"""Which attempt may write: each claims its number by creating a file, `<run.dir>/attempts/00007.json`.

A claim names the snapshot that the attempt continues. So readers can tell which snapshots follow from which. And an
attempt that is still writing when a newer one has started (a preempted node that wakes up) can see that and stop.
"""

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field, TypeAdapter

from mingpt.errors import Superseded, UserError
from mingpt.files.folder import File, Folder
from mingpt.snapshot.format import Manifest
from mingpt.world.env import Env

CLAIM = re.compile(r"([0-9]{5,})\.json")
SEGMENT = re.compile(r"attempt-([0-9]{5,})\.jsonl")  # metrics: one file per attempt
VISIBLE_SECONDS = 10  # NFS clients cache for a few seconds that a file does not exist
TRAIN, REWIND = "train", "rewind"
NO_END = 2**32  # no run has so many steps


Count = Annotated[int, Field(ge=0, lt=NO_END)]


@dataclass(frozen=True)
class Record:
    """The content of a claim."""

    number: int = 0  # in the file's name, not in the file
    id: str = ""  # random: on a store without conditional puts two attempts may take one number
    # The snapshot that the attempt continues, and the attempt that wrote it; 0, None, 0 if it starts from nothing.
    from_step: Count = 0
    from_digest: str | None = None
    parent: Count = 0
    by: Annotated[str, Field(pattern=f"^({TRAIN}|{REWIND})$")] = TRAIN
    dropped: tuple[Count, Count] | None = None  # batches (first, end) that no step shows after this rewind
    undoes: Annotated[int, Field(gt=0)] | None = None  # the number of an earlier rewind that this one takes back
    process: dict[str, Any] | None = None  # see `this_process`
    at: Any = None  # when the claim was made; a stranger's may be anything


CLAIM_FILE = TypeAdapter(Record)


def utc_now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def this_process() -> dict[str, Any]:
    """Who makes a claim. A pid means something on one boot, in one pid namespace: `machine`; "": not known.

    launcher: what starts this process again; it never runs two attempts at once. started: in ticks since the boot.
    """
    try:
        where = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
        machine = sha256(where.encode()).hexdigest()[:16]
    except OSError:  # not Linux
        machine = ""
    env, pid = Env.read(), os.getpid()
    launcher = env.job or (f"{machine} {env.agent}" if env.agent else "")
    return {
        "host": socket.gethostname(), "pid": pid, "machine": machine, "started": _started(pid), "launcher": launcher,
    }  # fmt: skip


def _started(pid: int) -> str:
    """Empty if there is no such process, or one that has ended and that its parent has not asked for."""
    # The start tells a process from a later one that has got the same pid.
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else numbers[18]


def runs_here(record: Record) -> bool | None:
    """Whether the process that made a claim is alive on this machine. None: it was on another one, or nobody knows."""
    process, ours = record.process or {}, this_process()
    pid, started, launcher = process.get("pid"), process.get("started"), process.get("launcher")
    if launcher and launcher == ours["launcher"]:  # it started this process in its place, perhaps on another node
        return False
    if type(pid) is not int or not started or not ours["machine"] or process.get("machine") != ours["machine"]:
        return None
    return pid != ours["pid"] and _started(pid) == started


def line_of(claims: Mapping[int, Record], newest: int | None = None) -> dict[int, tuple[int, int]]:
    """The line of attempts that leads to an attempt (default: the newest), which is the first of them.

    By number: the step that it continues, and the last one that the line took of it; NO_END: all that it computed. The
    last of them may have no claim: it is one of the run that this one was forked from.
    """
    number, end = max(claims, default=0) if newest is None else newest, NO_END
    line = dict[int, tuple[int, int]]()
    while record := claims.get(number):
        line[number] = record.from_step, end
        end = min(end, record.from_step)
        number = min(record.parent, number - 1)
    return line | ({number: (0, end)} if number > 0 else {})


def without_undone(claims: Mapping[int, Record]) -> dict[int, Record]:
    """Without the rewinds that were taken back, and what was computed after them."""
    undone = {n for u, r in claims.items() if r.undoes for n in range(r.undoes, u)}
    return {n: record for n, record in claims.items() if n not in undone}


def make_run_dir(run_dir: str) -> None:
    """Make a local run's folder. Raises UserError where there can be none, and for the root of the file system.

    The root is what run.dir=$DIR/ becomes with an empty DIR.
    """
    folder = Folder(run_dir)
    if not folder.local:
        return
    shown = folder.shown
    if Path(folder.root).resolve() == Path("/"):
        raise UserError(f"{shown}: this is the root of the file system: give a folder of its own")
    with folder.named_errors():
        try:
            os.makedirs(folder.root, exist_ok=True)
        except FileNotFoundError as error:
            raise UserError(f"{shown}: this folder can't be created there: choose another place") from error
    folder.check()


def _claims(run_dir: str) -> dict[int, File]:
    return {int(file.match[1]): file for file in Folder(run_dir).find("attempts", CLAIM)}


def segments(run_dir: str) -> dict[int, str]:
    """The names of the attempts' metrics in run_dir, by attempt number."""
    return {int(file.match[1]): file.name for file in Folder(run_dir).find("metrics", SEGMENT)}


def newest_number(run_dir: str) -> int:
    """The number of the newest attempt; 0 if there was none."""
    return max([*_claims(run_dir), *segments(run_dir)], default=0)


def records(run_dir: str) -> dict[int, Record]:
    """All claims by attempt number, without those that can't be read."""
    return _read(run_dir, _claims(run_dir))


def _read(run_dir: str, claims: Mapping[int, File]) -> dict[int, Record]:
    contents = Folder(run_dir).read_all(claims.values())
    read = dict[int, Record]()
    for number, file in claims.items():
        # One that is damaged or can't be had is left out: as if that attempt had left no word of where it began.
        if file.name in contents and (record := _decode(number, contents[file.name])):
            read[number] = record
    return read


def _decode(number: int, raw: bytes) -> Record | None:
    try:
        record = CLAIM_FILE.validate_json(raw, strict=True)
    except ValueError:
        return None
    dropped = record.dropped or (0, 1)
    good = record.id and dropped[0] < dropped[1] and (record.undoes or 0) < number
    return replace(record, number=number) if good else None


@dataclass(frozen=True)
class Attempt:
    """The claim of this process's own attempt."""

    run_dir: str
    record: Record

    @property
    def number(self) -> int:
        return self.record.number

    @classmethod
    def claim(
        cls,
        run_dir: str,
        from_step: int,
        from_digest: str | None,
        parent: int = 0,
        by: str = TRAIN,
        above: int = 0,
        dropped: tuple[int, int] | None = None,
        undoes: int | None = None,
    ) -> "Attempt":
        """Create the claim with the next free number above `above` and all known attempts. Called by one process.

        Two attempts that start at once get two numbers. On a store that ignores conditional puts both may take the same
        one. Then the last to write owns it, and the other one finds that out before its first commit.
        """
        number = max(newest_number(run_dir), parent, above)  # with snapshot.dir set, run.dir may be new
        while True:
            number += 1
            record = Record(
                number, uuid4().hex, from_step, from_digest, parent, by, dropped, undoes, this_process(), utc_now()
            )
            fields = asdict(record)
            for key in ("dropped", "undoes"):
                if fields[key] is None:
                    del fields[key]
            del fields["number"]  # it is in the file's name
            if Folder(run_dir).create(_name(number), json.dumps(fields).encode()):
                return cls(run_dir, record)

    def check(self) -> None:
        """Raise Superseded if a newer attempt has started."""
        claims = _claims(self.run_dir)
        number = max(claims, default=0)
        # Only the newest is read: this is done before each commit, and a run may have had hundreds of attempts.
        newest = _read(self.run_dir, {number: claims[number]}).get(number) if claims else None
        # One that can't be read is believed to be ours: a bad sector must not end a run.
        ours = number == self.number and (newest is None or newest.id == self.record.id)
        if number < self.number or ours:
            return
        what = "the run was rewound" if newest and newest.by == REWIND else f"attempt {number} has started"
        raise Superseded(
            f"run.dir={self.run_dir}: {what} while this attempt, number {self.number}, was still "
            f"training: this one ends here, and the newer one goes on; two runs need two places"
        )


@dataclass(frozen=True)
class RunRecord:
    """What an attempt writes beside the state."""

    attempt: int  # its number
    claim: Attempt | None  # in rank 0
    provenance: Mapping[str, Any]  # the manifest's fields run, vocabulary, config, fingerprint, history


def _name(number: int) -> str:
    return f"attempts/{number:05d}.json"


def is_visible(run_dir: str, number: int) -> bool:
    """Whether this process sees the claim that rank 0 has just made. Waits up to VISIBLE_SECONDS for it."""
    folder, deadline = Folder(run_dir), time.monotonic() + VISIBLE_SECONDS
    while True:
        if folder.read(_name(number)) is not None:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


# A fork: a run whose first snapshot is a step of another run

FORK = "fork"  # an attempt's entry in the history that has this field is no attempt: the run begins there


@dataclass(frozen=True)
class Parent:
    """The snapshot that a run was forked from."""

    run: str
    id: str | None  # of the parent run, if it has one
    dir: str  # where it was
    step: Count
    digest: str
    attempt: Count
    claim: str | None = None  # the id of the claim of the attempt that wrote it, which no other run has
    keys: tuple[str, ...] = ()  # what the fork's command line has changed


PARENT = TypeAdapter(Parent)


def parent_of(manifest: Manifest | None) -> Parent | None:
    """The parent of the run that a snapshot belongs to. A manifest may be a stranger's: nothing in it is believed."""
    entry = None
    for attempt in manifest.history if manifest else ():
        if isinstance(attempt.get(FORK), dict):
            entry = attempt[FORK]  # the last one, of a fork of a fork
    if entry is None or entry.keys() != Parent.__annotations__.keys():
        return None
    try:
        return PARENT.validate_json(json.dumps(entry), strict=True)
    except ValueError:
        return None


def new_named(manifest: Manifest) -> Parent | None:
    """The parent of a fork that has not trained yet: its keys may differ from the snapshot's config."""
    return parent_of(manifest) if manifest.history and FORK in manifest.history[-1] else None
