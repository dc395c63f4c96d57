"""Ends this process when the run hangs, and says where: which process has not entered which collective, and its line.

Progress is a microbatch read or evaluated, or a collective entered (world.Progress). Each process publishes its own
through the rendezvous' store, and reads that of the others once it makes none itself. It is a hang only if no process
makes progress: one that waits for a slower one, in an evaluation for example, does not end the run.

A process that is gone is noticed by peers.py, within seconds.
"""

import faulthandler
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace

from mingpt.cli.console import complain
from mingpt.config.schema import Config
from mingpt.errors import CRASHED, Hang, exit_now
from mingpt.world.clock import COMPILE, SNAPSHOT, compiler_named
from mingpt.world.failures import NO_ANSWER
from mingpt.world.hangreport import Report, announce, dump, locate, summary
from mingpt.world.lifetime import Lifetime, Phase, leave_reason
from mingpt.world.world import Progress, World

LEAST_BEAT_SECONDS, MOST_BEAT_SECONDS = 0.05, 2.0  # between two looks of a watchdog
LEAST_SILENCE_SECONDS = 3.0  # a process that has not answered for less may only be slow
NOTIFY_SECONDS = 10.0  # for telling observers of the hang, before the process that tells ends
# A wait for snapshots has limits of its own, each at most this many times world.timeout_seconds in all.
SNAPSHOT_TIMEOUTS = 6


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
        self.watched = threading.get_ident()
        self.host = socket.gethostname()
        self.stopped = threading.Event()
        self.reports = dict[int, Report]()  # the last one of each process
        self.heard = dict[int, float]()  # when each process's last beat was read, by `awake`
        self.awake = 0.0  # seconds in which this process was not stopped: a laptop sleeps, Slurm suspends a job
        self.trouble = ""  # why the store can't be reached
        self.complaints = set[str]()  # what has failed here
        self.overdue = False  # it waits for its GPU, and that for another process, for longer than the limit
        self._done = (-1, -1)  # collectives and microbatches at the last look
        self._since = 0.0  # when they last grew, by `awake`
        self._now = time.monotonic()  # of the last look
        # Whether to read the others' reports. Not while all is well: with 512 processes that would be 512 x 511 reports
        # every two seconds, all of them from the one store.
        self._asking = False
        self.look()
        self.threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        if world.store is not None and world.size > 1:
            self.threads.append(threading.Thread(target=self._talk, name="watchdog-store", daemon=True))

    def look(self) -> Report:
        """This process's report, with the time since the last look counted as without progress if there was none."""
        now = time.monotonic()
        # A look that comes late comes after a pause (SIGSTOP, a closed lid), in which nobody could make progress.
        # Counted whole, each pause that is longer than the limit would end a healthy run.
        self.awake += min(now - self._now, 2 * self.beat_seconds)
        self._now = now
        place = locate(sys._current_frames().get(self.watched))
        done = (Progress.collectives, Progress.microbatches)
        if self._done != done:
            self._done, self._since = done, self.awake
        idle = self.awake - self._since
        limit = self.seconds
        if self.lifetime.clock.phase == SNAPSHOT:
            limit += SNAPSHOT_TIMEOUTS * self.timeout
        # In the first step a GPU loads its libraries, and NCCL makes its connections.
        elif self.lifetime.clock.phase == COMPILE or self.lifetime.phase < Phase.TRAINING:
            limit += self.timeout
        self._asking = idle >= limit / 2
        # gloo's waits end at world.timeout_seconds by themselves. NCCL's end with SIGABRT, a minute later and without a
        # reason, also where the other process makes progress and is only slow.
        on_gpus = self.world.device.type == "cuda" and self.world.size > 1
        self.overdue = on_gpus and idle >= limit - self.seconds + self.timeout and not self.lifetime.ending
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
        silent = set[int]()
        for rank in range(self.world.size):
            if rank != self.world.rank and self.awake - self.heard.get(rank, 0.0) >= self.silence_seconds:
                silent.add(rank)
        return silent

    def hangs(self) -> bool:
        """Whether no process makes progress: each of them says so, or is silent."""
        own, silent = self.look(), self.silent()
        others = set(range(self.world.size)) - {self.world.rank} - silent
        return own.stuck and all(rank in self.reports and self.reports[rank].stuck for rank in others)

    def _watch(self) -> None:
        while not self.stopped.wait(self.beat_seconds):
            self._survive(self.arm)  # by itself: each time it starts a thread, for which memory may be too short
            self._survive(self._look_out)
        faulthandler.cancel_dump_traceback_later()

    def arm(self) -> None:
        """If the watching thread does not come in time, since the interpreter lock is held, print the stacks.

        Later than other processes print theirs, and before one of these ends the run: faulthandler writes a line in
        pieces, and another process's lines would come between.
        """
        if sys.stderr is not None:
            faulthandler.dump_traceback_later(self.seconds + self.silence_seconds / 2, file=2)

    def _look_out(self) -> None:
        if self.hangs():
            self._survive(lambda: dump(self.world, self.reports[self.world.rank], self.seconds))
            # The others come to the same by their own looks. Until they have printed their stacks, nobody may end: the
            # launcher then ends all of them.
            until = self.awake + self.silence_seconds
            while self.awake < until and not self.stopped.wait(self.beat_seconds) and self.hangs():
                pass
            if self.awake >= until and not self.stopped.is_set() and self.hangs():
                self._end(self._tell)
        if self.overdue:
            self._end(self._tell_overdue)

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
        others = [rank for rank in range(self.world.size) if rank != me]
        try:
            while True:
                store.set(_key(me), json.dumps(asdict(self.reports[me])))
                if self._asking:
                    # To get a key that is not there would wait. One request asks for all; only if one process has never
                    # answered, one request for each says which.
                    answered = others
                    if not store.check([_key(rank) for rank in others]):
                        answered = [rank for rank in others if store.check([_key(rank)])]
                    self._hear(answered, store.multi_get([_key(rank) for rank in answered]))
                if self.stopped.wait(self.beat_seconds):
                    return
        except Exception as error:  # the others are silent from now on, and the summary says why
            self.trouble = str(error).strip().partition("\n")[0] or type(error).__name__

    def _hear(self, ranks: Sequence[int], answers: Sequence[bytes]) -> None:
        for rank, raw in zip(ranks, answers, strict=True):
            report = Report(**json.loads(raw))
            before = self.reports.get(rank)
            if before is None or before.beat != report.beat:
                self.reports[rank], self.heard[rank] = report, self.awake

    def _end(self, tell: Callable[[], None]) -> None:
        """Say why, and end this process, whatever fails in that."""
        try:
            self._survive(tell)
        finally:
            exit_now(CRASHED)

    def _tell_overdue(self) -> None:
        reason = f"{NO_ANSWER} ({self.timeout:g} s; in {self.reports[self.world.rank].place})"
        who = f"rank {self.world.rank} on {self.host}: "
        announce(Hang(reason), self.lifetime.failed, who).join(NOTIFY_SECONDS)

    def _tell(self) -> None:
        silent = self.silent()
        text = summary(dict(self.reports), silent) + (f" ({self.trouble})" if self.trouble else "")
        reason = f"the run hangs: {text}. If no process hangs, raise health.hang_seconds={self.seconds:g}"
        leave_reason(reason)
        first = min(set(range(self.world.size)) - silent)
        # When the first process ends, the others lose it, and a launcher ends them: first let each leave its reason.
        # The one that tells ends before the others. In rank 0, observers would be told of a lost contact, too.
        if self.world.rank == first:
            teller = announce(Hang(reason), self.failed)
            self._stay(self.silence_seconds)
            self._stay(NOTIFY_SECONDS - self.silence_seconds, lambda: not teller.is_alive())
            self._report(announced=True)
            self._stay(2 * self.beat_seconds)
        else:
            self._stay(self.silence_seconds)
            self._stay(NOTIFY_SECONDS + self.silence_seconds, lambda: self.reports[first].announced)
            self._stay(6 * self.beat_seconds)

    def _stay(self, seconds: float, over: Callable[[], bool] = lambda: False) -> None:
        """Go on answering the others, until `over` is true, but not longer than `seconds`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not over():
            self._report()
            time.sleep(self.beat_seconds)

    def _report(self, announced: bool = False) -> None:
        own = self.reports[self.world.rank]
        self.reports[self.world.rank] = replace(own, beat=own.beat + 1, announced=own.announced or announced)


def _key(rank: int) -> str:
    """The key of a process's report in the store."""
    return f"watchdog/{rank}"


@contextmanager
def watched(
    config: Config, world: World, lifetime: Lifetime, failed: Callable[[BaseException], None] = lambda error: None
) -> Iterator[None]:
    """Watch what this block does, in the calling thread. failed: see Watchdog."""
    if not config.health.hang_seconds:
        yield
        return
    watchdog = Watchdog(config, world, lifetime, failed)
    watchdog.arm()  # not only after the first beat, into which fifty short steps fit
    for thread in watchdog.threads:
        thread.start()
    try:
        with compiler_named(lifetime.clock) if config.train.compile else nullcontext():
            yield
    finally:
        watchdog.stopped.set()
        for thread in watchdog.threads:
            thread.join(watchdog.beat_seconds)
