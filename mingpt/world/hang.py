"""Ends a run that hangs, and says where: which process has not entered which collective, and at which line it is.

Progress is a microbatch read or evaluated, or a collective entered (world.Progress). Each process publishes its own
through the rendezvous' store, and reads that of the others once it makes none itself. It is a hang only if no process
makes progress: one that waits for a slower one does not end the run.
"""

import faulthandler
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

import torch

from mingpt.config.schema import Config
from mingpt.console import complain
from mingpt.errors import CRASHED, Hang
from mingpt.world.lifetime import Lifetime, Phase, leave_reason
from mingpt.world.world import Progress, World

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
LIBRARY = re.compile(rf"<|{re.escape(str(Path(threading.__file__).parent))}/|.*/(site|dist)-packages/")
MOST_NAMED = 4  # processes of which the same is to be said
LEAST_BEAT_SECONDS, MOST_BEAT_SECONDS = 0.05, 2.0
LEAST_SILENCE_SECONDS = 3.0
NOTIFY_SECONDS = 10.0  # for telling of the hang, before the process that tells ends
# A wait for snapshots has limits of its own, each at most this many times world.timeout_seconds in all.
SNAPSHOT_TIMEOUTS = 6
DUMP_SIGNAL = signal.SIGUSR2  # has a loader process print its stacks: see data/loader.py


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
    """The innermost line of a stack that is ours or the user's, and what may take long there: "snapshot", "compile"."""
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


class Watchdog:
    """Two threads: one watches this process and decides, the other talks to the store, which may block."""

    def __init__(
        self, config: Config, world: World, lifetime: Lifetime, failed: Callable[[BaseException], None]
    ) -> None:
        """Watches the calling thread. failed: called before this process ends, in the first that answers."""
        self.world, self.lifetime, self.failed = world, lifetime, failed
        self.seconds, self.timeout = config.health.hang_seconds, config.world.timeout_seconds
        self.beat_seconds = min(MOST_BEAT_SECONDS, max(LEAST_BEAT_SECONDS, self.seconds / 20))
        self.silence_seconds = max(LEAST_SILENCE_SECONDS, 6 * self.beat_seconds)
        self.watched, self.host, self.stopped = threading.get_ident(), socket.gethostname(), threading.Event()
        self.reports = dict[int, Report]()  # the last one of each process
        self.heard = dict[int, float]()  # when each process's last beat was read, by `awake`
        self.awake = 0.0  # seconds in which this process was not stopped: a laptop sleeps, Slurm suspends a job
        self.trouble = ""  # why the store can't be reached
        self.complaints = set[str]()  # what has failed here
        self._done, self._since, self._now, self._asking = (-1, -1), 0.0, time.monotonic(), False
        self.look()
        self.threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        if world.store is not None and world.size > 1:
            self.threads.append(threading.Thread(target=self._talk, name="watchdog-store", daemon=True))

    def look(self) -> Report:
        """This process's report, with the time since the last look counted as without progress if there was none."""
        now = time.monotonic()
        self.awake, self._now = self.awake + min(now - self._now, 2 * self.beat_seconds), now
        place, slow = locate(sys._current_frames().get(self.watched))
        if self._done != (done := (Progress.collectives, Progress.microbatches)):
            self._done, self._since = done, self.awake
        idle, limit = self.awake - self._since, self.seconds
        if "snapshot" in slow:
            limit += SNAPSHOT_TIMEOUTS * self.timeout
        elif "compile" in slow or self.lifetime.phase < Phase.TRAINING:
            limit += self.timeout
        self._asking = idle >= limit / 2
        before = self.reports.get(self.world.rank)
        own = Report(
            host=self.host,
            beat=before.beat + 1 if before else 0,
            stuck=idle >= limit and not self.lifetime.ending,
            collectives=Progress.collectives,
            recent=list(Progress.recent),
            place=place,
        )
        self.reports[self.world.rank] = own
        return own

    def silent(self) -> set[int]:
        """The processes that have not answered for a while."""
        return {
            rank
            for rank in set(range(self.world.size)) - {self.world.rank}
            if self.awake - self.heard.get(rank, 0.0) >= self.silence_seconds
        }

    def hangs(self) -> bool:
        """Whether no process makes progress: each of them says so, or is silent."""
        own, silent = self.look(), self.silent()
        others = set(range(self.world.size)) - {self.world.rank} - silent
        return own.stuck and all(rank in self.reports and self.reports[rank].stuck for rank in others)

    def _watch(self) -> None:
        while not self.stopped.wait(self.beat_seconds):
            self._survive(self._look_out)
        faulthandler.cancel_dump_traceback_later()

    def _look_out(self) -> None:
        if sys.stderr is not None:  # prints the stacks if this thread comes no more: the interpreter lock is held
            faulthandler.dump_traceback_later(self.seconds, file=2)
        if self.hangs():
            self._survive(self._dump)
            until = self.awake + self.silence_seconds  # for the others to say the same, and to print their stacks
            while self.awake < until and not self.stopped.wait(self.beat_seconds) and self.hangs():
                pass
            if self.awake >= until and not self.stopped.is_set() and self.hangs():
                self._end()

    def _survive(self, call: Callable[[], None]) -> None:
        """Report what `call` raises, each error once. The watching goes on: without it a hang has no end."""
        try:
            call()
        except Exception as error:
            complaint = f"rank {self.world.rank}: the watchdog failed, and goes on: {type(error).__name__}: {error}"
            if complaint not in self.complaints:
                self.complaints.add(complaint)
                complain(complaint)

    def _talk(self) -> None:
        store, me = self.world.store, self.world.rank
        assert store is not None
        keys = {rank: f"watchdog/{rank}" for rank in range(self.world.size)}
        others = [rank for rank in keys if rank != me]
        try:
            while True:
                store.set(keys[me], json.dumps(asdict(self.reports[me])))
                if self._asking:
                    there = others if store.check([keys[rank] for rank in others]) else []
                    there = there or [rank for rank in others if store.check([keys[rank]])]  # one has never answered
                    self._hear(there, store.multi_get([keys[rank] for rank in there]))
                if self.stopped.wait(self.beat_seconds):
                    return
        except Exception as error:  # the others are silent from now on, and the summary says why
            self.trouble = str(error).strip().partition("\n")[0] or type(error).__name__

    def _hear(self, ranks: Sequence[int], answers: Sequence[bytes]) -> None:
        for rank, raw in zip(ranks, answers, strict=True):
            report, before = Report(**json.loads(raw)), self.reports.get(rank)
            if before is None or before.beat != report.beat:
                self.reports[rank], self.heard[rank] = report, self.awake

    def _dump(self) -> None:
        """Print this process's stacks, and on CUDA the collectives that NCCL's flight recorder has as not ended."""
        faulthandler.cancel_dump_traceback_later()  # this is it
        own = self.reports[self.world.rank]
        try:
            with tempfile.TemporaryFile() as file:
                faulthandler.dump_traceback(file, all_threads=True)
                file.seek(0)
                stacks = file.read().decode(errors="replace")
        except OSError as error:  # a full disk: then as they come, between other lines
            stacks = f"the stacks are printed directly, since there is no room for a file: {error}"
            faulthandler.dump_traceback(2, all_threads=True)
        what = f"no progress for {self.seconds:g} s (health.hang_seconds); last entered {own.last}; in {own.place}"
        complain(f"rank {self.world.rank} on {self.host}: {what}\n{stacks}")
        if self.world.device.type == "cuda":
            record = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
            with suppress(RuntimeError, TypeError):  # without a recorder, or with other parameters
                complain(f"rank {self.world.rank}: NCCL: {record(onlyActive=True) if record else 'not recorded'}")
        for child in multiprocessing.active_children():
            if child.name.startswith("SpawnProcess") and child.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, DUMP_SIGNAL)

    def _end(self) -> None:
        """Say where the run hangs, and end this process, whatever fails in that."""
        try:
            self._survive(self._tell)
        finally:
            os._exit(CRASHED)

    def _tell(self) -> None:
        silent = self.silent()
        text = summary(dict(self.reports), silent) + (f" ({self.trouble})" if self.trouble else "")
        reason = f"the run hangs: {text}. If no process hangs, raise health.hang_seconds={self.seconds:g}"
        leave_reason(reason)
        first = min(set(range(self.world.size)) - silent)
        # When the first process ends, the others lose it, and a launcher ends them: first let each leave its reason.
        # The one that tells ends before the others. In rank 0, observers would be told of a lost contact, too.
        if self.world.rank == first:
            complain(f"error: {reason}")
            teller = threading.Thread(target=self._survive, args=[lambda: self.failed(Hang(reason))], daemon=True)
            teller.start()
            self._stay(self.silence_seconds)
            self._stay(NOTIFY_SECONDS - self.silence_seconds, lambda: not teller.is_alive())
            self._report(told=True)
            self._stay(2 * self.beat_seconds)
        else:
            self._stay(self.silence_seconds)
            self._stay(NOTIFY_SECONDS + self.silence_seconds, lambda: self.reports[first].told)
            self._stay(6 * self.beat_seconds)

    def _stay(self, seconds: float, over: Callable[[], bool] = lambda: False) -> None:
        """Go on answering the others, until `over` is true, but not longer than `seconds`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not over():
            self._report()
            time.sleep(self.beat_seconds)

    def _report(self, told: bool = False) -> None:
        own = self.reports[self.world.rank]
        self.reports[self.world.rank] = replace(own, beat=own.beat + 1, told=own.told or told)


@contextmanager
def watched(
    config: Config, world: World, lifetime: Lifetime, failed: Callable[[BaseException], None] = lambda error: None
) -> Iterator[None]:
    """Watch what this block does, in the calling thread. failed: see Watchdog."""
    if not config.health.hang_seconds:
        yield
        return
    watchdog = Watchdog(config, world, lifetime, failed)
    for thread in watchdog.threads:
        thread.start()
    try:
        yield
    finally:
        watchdog.stopped.set()
        for thread in watchdog.threads:
            thread.join(watchdog.beat_seconds)
