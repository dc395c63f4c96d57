"""What processes report of themselves to a watchdog (liveness.py), and what follows from that: where the run hangs."""

import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from mingpt.console import complain
from mingpt.world.world import Progress, World

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
LIBRARY = re.compile(rf"<|{re.escape(str(Path(threading.__file__).parent))}/|.*/(site|dist)-packages/")
DUMP_SIGNAL = signal.SIGUSR2  # has a loader process print its stacks: see data/loader.py
MOST_NAMED = 4  # processes of which the same is to be said


@dataclass(frozen=True)
class Report:
    """What a process says of itself. beat: grows while its watchdog lives. stuck: no progress for its limit.

    collectives: how many it has entered. recent: the names of the last ones. place: where its main thread is.
    told: it has told of the hang, and ends.
    """

    host: str
    beat: int
    stuck: bool
    collectives: int
    recent: list[str]
    place: str
    told: bool = False

    @property
    def last(self) -> str:
        """The last collective that it has entered, and its number."""
        return f"{self.recent[-1]} #{self.collectives}" if self.recent else "no collective"

    def name_of(self, number: int) -> str | None:
        """The name of the collective with this number, from 1; None if it is not among the last ones."""
        ago = self.collectives - number
        return self.recent[-1 - ago] if 0 <= ago < len(self.recent) else None


def locate(frame: FrameType | None) -> tuple[str, set[str]]:
    """The innermost line of a stack that is ours or the user's, and what may take long there.

    That is "snapshot" or "compile".
    """
    place, inner, slow = "", "", set[str]()
    while frame is not None:
        file = frame.f_code.co_filename
        ours = file.removeprefix(PACKAGE) if file.startswith(PACKAGE) else ""
        if not place and (ours or not LIBRARY.match(file)):
            place = f"{ours or '/'.join(Path(file).parts[-2:])}:{frame.f_lineno}"
        inner = inner or next((room for room in ("snapshot", "train") if ours.startswith(room + os.sep)), "")
        if file.endswith(os.path.join("torch", "_dynamo", "convert_frame.py")):
            slow.add("compile")
        frame = frame.f_back
    return place or "a library", slow | ({"snapshot"} & {inner})


def summary(reports: Mapping[int, Report], silent: set[int]) -> str:
    """Where a run hangs. reports: by rank, the last one of each process. silent: those that answer no more."""

    def who(rank: int) -> str:
        return f"rank {rank} on {reports[rank].host}" if rank in reports else f"rank {rank}"

    gone = "does not answer (it is stopped, or holds the interpreter lock, or its machine is gone)"
    lines = [
        f"{who(rank)} {gone}; its last known collective is {reports[rank].last if rank in reports else 'not known'}"
        for rank in sorted(silent)
    ]
    counts = [r.collectives for r in reports.values()]
    for number in range(max(1, max(counts) - (Progress.recent.maxlen or 0) + 1), max(counts) + 1):
        names = {rank: name for rank, r in sorted(reports.items()) if (name := r.name_of(number))}
        usual = Counter(names.values()).most_common(1)[0][0]
        if odd := [rank for rank in names if names[rank] != usual]:
            what = f"{who(odd[0])} has entered {names[odd[0]]} as #{number}, where others have entered {usual}"
            lines.append(f"{what}: one of them has left out a collective; it is in {reports[odd[0]].place}")
            return "; ".join(lines)
    number = min(counts) + 1
    behind = [rank for rank, r in sorted(reports.items()) if r.collectives < number <= max(counts)]
    name = next((name for r in reports.values() if (name := r.name_of(number))), "collective")
    named = [rank for rank in behind if rank not in silent][:MOST_NAMED]
    lines += [f"{who(rank)} has not entered {name} #{number}; it is in {reports[rank].place}" for rank in named]
    if not lines:
        ranks = sorted(reports)[:MOST_NAMED]
        lines = [f"{who(rank)} last entered {reports[rank].last}, and is in {reports[rank].place}" for rank in ranks]
    return "; ".join(lines)


def complain_apart(text: str) -> None:
    """On a line of its own: a process that holds its interpreter lock prints its stacks in pieces of lines."""
    complain(f"\n{text}")


def dump(world: World, report: Report, seconds: float) -> None:
    """Print this process's stacks, and on CUDA the collectives that NCCL's flight recorder has as not ended."""
    faulthandler.cancel_dump_traceback_later()  # this is it
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read().decode(errors="replace")
    except OSError as error:  # a full disk: then as they come, between other lines
        stacks = f"the stacks are printed directly, since there is no room for a file: {error}"
        faulthandler.dump_traceback(2, all_threads=True)
    what = f"no progress for {seconds:g} s (health.hang_seconds); last entered {report.last}; in {report.place}"
    complain_apart(f"rank {world.rank} on {report.host}: {what}\n{stacks}")
    if world.device.type == "cuda":
        record = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
        with suppress(RuntimeError, TypeError):  # without a recorder, or with other parameters
            complain(f"rank {world.rank}: NCCL: {record(onlyActive=True) if record else 'not recorded'}")
    for child in multiprocessing.active_children():
        if child.name.startswith("SpawnProcess") and child.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(child.pid, DUMP_SIGNAL)
