"""Processes without ranks tell each other things over a store, which may end with the first node's agent."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

from torch.distributed import TCPStore

from mingpt.world.attempt_store import gather_over

SHORT = 1.0  # of one who waits for what must not come


class Slow(TCPStore):
    """The store of a process that is slow to read."""

    until: Event
    was_first = False

    def multi_get(self, keys: list[str]) -> Any:
        self.was_first = not self.until.wait(SHORT)
        return super().multi_get(keys)


def test_nobody_goes_on_before_all_have_read() -> None:
    """Seen with two runs under one name and `mingpt launch`: the head ended with 64, and the other node with 70, for
    want of the store, before it had removed its probe."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    slow = Slow("127.0.0.1", server.port, is_master=False)
    slow.until = has_read = Event()

    def act(rank: int) -> list[Any]:
        gathered = gather_over((server, slow)[rank], rank, 2, 60)(rank)
        if rank == 0:
            has_read.set()
        return gathered

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(act, (0, 1))] == [[0, 1], [0, 1]]
    assert slow.was_first
