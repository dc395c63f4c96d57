"""What processes report of themselves to a watchdog (liveness.py), and what follows from that: where the run hangs."""

import faulthandler
import multiprocessing
import os
import re
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from mingpt.cli.console import complain
from mingpt.errors import TransientError
from mingpt.world.lifetime import leave_reason
from mingpt.world.world import Progress, World

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
# Code of others: frozen modules, the standard library, installed packages. What is left is ours or the user's.
LIBRARY = re.compile(rf"<|{re.escape(str(Path(threading.__file__).parent))}/|.*/(site|dist)-packages/")
DUMP_SIGNAL = signal.SIGUSR2  # has a loader process print its stacks: see data/loader.py
MOST_NAMED = 4  # processes of which the same is to be said


@dataclass(frozen=True)
class Report:
    """What a process says of itself, as JSON through the rendezvous' store."""

    host: str
    beat: int  # grows while its watchdog lives: an old report that is read again is no sign of life
    stuck: bool  # no progress for its limit
    collectives: int  # how many it has entered in this attempt
    recent: list[str]  # the names of the last ones, oldest first
    place: str  # where its main thread is
    announced: bool = False  # it has said why the run hangs, and ends

    @property
    def last(self) -> str:
        """The last collective that it has entered, and its number."""
        return f"{self.recent[-1]} #{self.collectives}" if self.recent else "no collective"

    def name_of(self, number: int) -> str | None:
        """The name of the collective with this number, from 1; None if it is not among the last ones."""
        ago = self.collectives - number
        return self.recent[-1 - ago] if 0 <= ago < len(self.recent) else None


def locate(frame: FrameType | None) -> str:
    """The innermost line of a stack that is ours or the user's: a library's own line says nothing to the reader."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{file.removeprefix(PACKAGE)}:{frame.f_lineno}"
        if not LIBRARY.match(file):
            return f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "a library"


def summary(reports: Mapping[int, Report], silent: set[int]) -> str:
    """Where a run hangs. reports: by rank, the last one of each process. silent: those that answer no more."""
    lines = list[str]()
    for rank in sorted(silent):
        gone = "does not answer (it is stopped, or holds the interpreter lock, or its machine is gone)"
        last = reports[rank].last if rank in reports else "not known"
        lines.append(f"{_who(rank, reports)} {gone}; its last known collective is {last}")
    odd = _odd_one(reports)
    if odd:
        # Who has left out a collective has counted one less since then, so nothing that follows from numbers holds.
        return "; ".join([*lines, odd])
    counts = [report.collectives for report in reports.values()]
    # All processes enter the same collectives in the same order. So those that have entered the fewest hold the others
    # up, and where they are is what the reader wants to know.
    number = min(counts) + 1
    behind = list[int]()
    name = None
    for rank, report in sorted(reports.items()):
        if report.collectives < number <= max(counts) and rank not in silent:
            behind.append(rank)
        name = name or report.name_of(number)
    for rank in behind[:MOST_NAMED]:
        lines.append(
            f"{_who(rank, reports)} has not entered {name or 'collective'} #{number}; it is in {reports[rank].place}"
        )
    if not lines:  # all are in the same one: the network, or a device
        for rank in sorted(reports)[:MOST_NAMED]:
            report = reports[rank]
            lines.append(f"{_who(rank, reports)} last entered {report.last}, and is in {report.place}")
    return "; ".join(lines)


def _who(rank: int, reports: Mapping[int, Report]) -> str:
    return f"rank {rank} on {reports[rank].host}" if rank in reports else f"rank {rank}"


def _odd_one(reports: Mapping[int, Report]) -> str:
    """A process that has entered another collective than most under the same number; "" if there is none."""
    newest = max(report.collectives for report in reports.values())
    oldest = max(1, newest - (Progress.recent.maxlen or 0) + 1)  # of older ones, names are not kept
    for number in range(oldest, newest + 1):
        names = dict[int, str]()
        for rank, report in sorted(reports.items()):
            name = report.name_of(number)
            if name:
                names[rank] = name
        usual = Counter(names.values()).most_common(1)[0][0]
        for rank, name in names.items():
            if name != usual:
                what = f"{_who(rank, reports)} has entered {name} as #{number}, where others have entered {usual}"
                return f"{what}: one of them has left out a collective; it is in {reports[rank].place}"
    return ""


def complain_apart(text: str) -> None:
    """Begin on a line of its own: a process that holds its interpreter lock prints its stacks in pieces of lines."""
    complain(f"\n{text}")


def announce(error: TransientError, failed: Callable[[BaseException], None], who: str = "") -> threading.Thread:
    """Say why this process ends, to its launcher, its log and, in a thread, its observers."""
    # In this order: first the launcher's file, since another process's end may end this one at any moment; observers
    # last, since a webhook or a tracker may not answer.
    leave_reason(str(error))
    complain_apart(f"error: {who}{error}")
    teller = threading.Thread(target=failed, args=[error], daemon=True)
    teller.start()
    return teller


def dump(world: World, report: Report, seconds: float) -> None:
    """Print this process's stacks, and on CUDA the collectives that NCCL's flight recorder has as not ended."""
    faulthandler.cancel_dump_traceback_later()  # this is it
    # To a file first: faulthandler writes a line in pieces, and the lines of other processes would come between.
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
        # Private, and other in each version of torch: what it knows is worth having, and no hang may fail for its sake.
        record = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
        with suppress(RuntimeError, TypeError):  # without a recorder, or with other parameters
            complain(f"rank {world.rank}: NCCL: {record(onlyActive=True) if record else 'not recorded'}")
    # A main thread that waits for data is in a library. Where the data hangs, only the loader's stacks say.
    for child in multiprocessing.active_children():
        if child.name.startswith("SpawnProcess") and child.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(child.pid, DUMP_SIGNAL)
