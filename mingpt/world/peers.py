"""Notices within seconds that another process has ended or died, whatever this one waits for.

On GPUs nothing else does: the host waits for its device, where NCCL's kernel waits for a process that is gone. So, over
a gloo group of its own, rank 0 waits for a message from each process, and each process for one from rank 0. It never
comes; the wait fails when the connection breaks, since the kernel of a dead process's machine closes it. A process that
is slow, or stopped, keeps its connection. (A machine that is gone: see network.limit_silence.)
"""

import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from mingpt.console import complain
from mingpt.errors import CRASHED, TransientError, exit_now
from mingpt.world.failures import LOST_PEER
from mingpt.world.lifetime import Lifetime, Phase, leave_reason
from mingpt.world.world import World

FOR_EVER = timedelta(days=3650)
GRACE_SECONDS = 5.0  # for the main thread to notice it, too, and to say more: gloo tells it at once
TELL_SECONDS = 5.0  # for telling observers, before this process ends


class Peers:
    """One thread for each connection: in rank 0 to all others, in the others to rank 0, which passes bad news on."""

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
        leave_reason(reason)
        complain(f"error: rank {self.world.rank}: {reason}")
        teller = threading.Thread(target=self.lifetime.failed, args=[TransientError(reason)], daemon=True)
        teller.start()
        teller.join(TELL_SECONDS)
        exit_now(CRASHED)

    def _ends(self) -> bool:
        """Whether this process is about to end by itself, within limits of its own."""
        return self.lifetime.ending or self.lifetime.phase is Phase.OVER


def watch(world: World, lifetime: Lifetime, limit_seconds: float) -> None:
    """From now on this process ends with 70 if another one is gone. Collective."""
    if world.size > 1:
        Peers(world, lifetime, limit_seconds)
