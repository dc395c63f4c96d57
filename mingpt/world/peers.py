"""Notices within seconds that another process has ended or died, whatever this one waits for, and ends this one.

On GPUs nothing else does: the host waits for its device, where NCCL's kernel waits for a process that is gone.
"""

import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from mingpt.errors import CRASHED, TransientError, exit_now
from mingpt.world.failures import LOST_PEER
from mingpt.world.hangreport import announce
from mingpt.world.lifetime import Lifetime, Phase
from mingpt.world.world import World

FOR_EVER = timedelta(days=3650)
GRACE_SECONDS = 5.0  # for the main thread to end this process itself
TELL_SECONDS = 5.0  # for telling observers, before this process ends


class Peers:
    """One thread for each connection: in rank 0 to all others, in the others to rank 0, which passes bad news on.

    Over a gloo group of its own, rank 0 waits for a message from each process, and each process for one from rank 0. It
    never comes; the wait fails when the connection breaks, since the kernel of a dead process's machine closes it. A
    process that is slow, or stopped, keeps its connection. (A machine that is gone: see network.limit_silence.)
    """

    def __init__(self, world: World, lifetime: Lifetime, limit_seconds: float) -> None:
        """Collective. limit_seconds: for the others to come here."""
        self.world, self.lifetime = world, lifetime
        self.group = world.side_group(limit_seconds).group
        self.known = threading.Lock()  # taken for good by the thread that has the first bad news
        # A star and not all pairs: with 512 processes that would be 511 threads and connections in each.
        self.others = list(range(1, world.size)) if world.is_main else [0]
        for rank in self.others:
            threading.Thread(target=self._wait, args=[rank], name=f"peer-{rank}", daemon=True).start()

    def _wait(self, rank: int) -> None:
        news = torch.tensor([rank])  # unless rank 0 says another one, it is this one that is gone
        with suppress(RuntimeError):  # the connection is broken
            work = dist.irecv(news, group=self.group, group_src=rank)
            assert work is not None
            work.wait(FOR_EVER)
        if self.known.acquire(blocking=False):
            self._lost(int(news))

    def _lost(self, rank: int) -> None:
        if self._ends():  # a normal end: all have entered its barrier
            return
        # Of two others, each has a connection to rank 0 alone: without these, only rank 0 would know.
        sends = list[object]()  # what is sent must stay in memory
        for other in self.others if self.world.is_main else ():
            with suppress(RuntimeError):
                sends.append(dist.isend(torch.tensor([rank]), group=self.group, group_dst=other))
        # gloo tells the main thread, too, unless it misses a dead peer (1 of 6, measured on a loaded machine). That
        # thread can then say more, and write what it has to write.
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.05)
            if self._ends():
                return
        reason = f"{LOST_PEER}: process {rank} has ended, or its machine is gone: its log says why"
        announce(TransientError(reason), self.lifetime.failed, f"rank {self.world.rank}: ").join(TELL_SECONDS)
        exit_now(CRASHED)

    def _ends(self) -> bool:
        """Whether this process is about to end by itself, within limits of its own."""
        return self.lifetime.ending or self.lifetime.phase is Phase.OVER


def watch(world: World, lifetime: Lifetime, limit_seconds: float) -> None:
    """Have this process end with 70 if another one is gone, from now on. Collective."""
    if world.size > 1:
        Peers(world, lifetime, limit_seconds)
