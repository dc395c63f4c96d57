"""Ends this process when others do not answer: a run that hangs (Watchdog), and a process that is gone (Peers).

Of a hang it says where: which process has not entered which collective, and at which line it is.

Progress is a microbatch read or evaluated, or a collective entered (world.Progress). Each process publishes its own
through the rendezvous' store, and reads that of the others once it makes none itself. It is a hang only if no process
makes progress: one that waits for a slower one does not end the run.
"""

import faulthandler
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from mingpt.config.schema import Config
from mingpt.console import complain
from mingpt.errors import CRASHED, Hang, TransientError, exit_now
from mingpt.world.clock import COMPILE, SNAPSHOT, compiler_named
from mingpt.world.failures import LOST_PEER, NO_ANSWER
from mingpt.world.hangreport import Report, complain_apart, dump, locate, summary
from mingpt.world.lifetime import Lifetime, Phase, leave_reason
from mingpt.world.world import Progress, World

LEAST_BEAT_SECONDS, MOST_BEAT_SECONDS = 0.05, 2.0
LEAST_SILENCE_SECONDS = 3.0
NOTIFY_SECONDS = 10.0  # for telling of the hang, before the process that tells ends
# A wait for snapshots has limits of its own, each at most this many times world.timeout_seconds in all.
SNAPSHOT_TIMEOUTS = 6
FOR_EVER = timedelta(days=3650)
GRACE_SECONDS = 5.0  # for the main thread to notice it, too, and to say more: gloo tells it at once
TELL_SECONDS = 5.0  # for telling observers, before this process ends


def _announce(error: TransientError, failed: Callable[[BaseException], None], who: str = "") -> threading.Thread:
    """Say why this process ends, to its launcher, its log and, in a thread, its observers."""
    leave_reason(str(error))
    complain_apart(f"error: {who}{error}")
    teller = threading.Thread(target=failed, args=[error], daemon=True)
    teller.start()
    return teller


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
        self.overdue = False  # it waits for its GPU, and that for another process, for longer than the limit
        self.look()
        self.threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        if world.store is not None and world.size > 1:
            self.threads.append(threading.Thread(target=self._talk, name="watchdog-store", daemon=True))

    def look(self) -> Report:
        """This process's report, with the time since the last look counted as without progress if there was none."""
        now = time.monotonic()
        self.awake, self._now = self.awake + min(now - self._now, 2 * self.beat_seconds), now
        place = locate(sys._current_frames().get(self.watched))
        if self._done != (done := (Progress.collectives, Progress.microbatches)):
            self._done, self._since = done, self.awake
        idle, limit = self.awake - self._since, self.seconds
        if self.lifetime.clock.phase == SNAPSHOT:
            limit += SNAPSHOT_TIMEOUTS * self.timeout
        # In the first step a GPU loads its libraries, and NCCL makes its connections.
        elif self.lifetime.clock.phase == COMPILE or self.lifetime.phase < Phase.TRAINING:
            limit += self.timeout
        self._asking = idle >= limit / 2
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
            until = self.awake + self.silence_seconds  # for the others to say the same, and to print their stacks
            while self.awake < until and not self.stopped.wait(self.beat_seconds) and self.hangs():
                pass
            if self.awake >= until and not self.stopped.is_set() and self.hangs():
                self._end(self._tell)
        if self.overdue:  # gloo's waits have this limit; nccl's own thread would end this process without a reason
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

    def _end(self, tell: Callable[[], None]) -> None:
        """Say why, and end this process, whatever fails in that."""
        try:
            self._survive(tell)
        finally:
            exit_now(CRASHED)

    def _tell_overdue(self) -> None:
        reason = f"{NO_ANSWER} ({self.timeout:g} s; in {self.reports[self.world.rank].place})"
        who = f"rank {self.world.rank} on {self.host}: "
        _announce(Hang(reason), self.lifetime.failed, who).join(NOTIFY_SECONDS)

    def _tell(self) -> None:
        silent = self.silent()
        text = summary(dict(self.reports), silent) + (f" ({self.trouble})" if self.trouble else "")
        reason = f"the run hangs: {text}. If no process hangs, raise health.hang_seconds={self.seconds:g}"
        leave_reason(reason)
        first = min(set(range(self.world.size)) - silent)
        # When the first process ends, the others lose it, and a launcher ends them: first let each leave its reason.
        # The one that tells ends before the others. In rank 0, observers would be told of a lost contact, too.
        if self.world.rank == first:
            teller = _announce(Hang(reason), self.failed)
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
    watchdog.arm()  # not only after the first beat: fifty short steps fit into it
    for thread in watchdog.threads:
        thread.start()
    try:
        with compiler_named(lifetime.clock) if config.train.compile else nullcontext():
            yield
    finally:
        watchdog.stopped.set()
        for thread in watchdog.threads:
            thread.join(watchdog.beat_seconds)


class Peers:
    """Notices within seconds that another process has ended or died, whatever this one waits for.

    On GPUs nothing else does: the host waits for its device, where NCCL's kernel waits for a process that is gone. So,
    over a gloo group of its own, rank 0 waits for a message from each process, and each process for one from rank 0. It
    never comes; the wait fails when the connection breaks, since the kernel of a dead process's machine closes it. A
    process that is slow, or stopped, keeps its connection. (A machine that is gone: see network.limit_silence.)

    One thread for each connection: in rank 0 to all others, in the others to rank 0, which passes bad news on.
    """

    def __init__(self, world: World, lifetime: Lifetime, limit_seconds: float) -> None:
        """Collective. limit_seconds: for the others to come here."""
        self.world, self.lifetime = world, lifetime
        self.group = world.side_group(limit_seconds).group
        self.known = threading.Lock()  # held by the thread that has the first bad news
        self.others = [rank for rank in range(world.size) if world.is_main != (rank == 0)]
        for rank in self.others:
            threading.Thread(target=self._wait, args=[rank], name=f"peer-{rank}", daemon=True).start()

    def _wait(self, rank: int) -> None:
        news = torch.tensor([rank])
        with suppress(RuntimeError):  # the connection is broken
            work = dist.irecv(news, group=self.group, group_src=rank)
            assert work is not None
            work.wait(FOR_EVER)
        if self.known.acquire(blocking=False):
            self._lost(int(news))

    def _lost(self, rank: int) -> None:
        if self._ends():  # a normal end: all have entered its barrier
            return
        told = list[object]()  # what is sent must stay in memory
        for other in self.others if self.world.is_main else ():
            with suppress(RuntimeError):
                told.append(dist.isend(torch.tensor([rank]), group=self.group, group_dst=other))
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.05)
            if self._ends():
                return
        reason = f"{LOST_PEER}: process {rank} has ended, or its machine is gone: its log says why"
        _announce(TransientError(reason), self.lifetime.failed, f"rank {self.world.rank}: ").join(TELL_SECONDS)
        exit_now(CRASHED)

    def _ends(self) -> bool:
        """Whether this process is about to end by itself, within limits of its own."""
        return self.lifetime.ending or self.lifetime.phase is Phase.OVER


def watch(world: World, lifetime: Lifetime, limit_seconds: float) -> None:
    """From now on this process ends with 70 if another one is gone. Collective."""
    if world.size > 1:
        Peers(world, lifetime, limit_seconds)
