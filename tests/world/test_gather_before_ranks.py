"""Processes without ranks tell each other things over a store, which may end with the first node's agent."""

from threading import Event, Thread
from typing import Any

from torch.distributed import TCPStore

from mingpt.world.attempt_store import gather_over

SHORT = 1.0  # of one who waits for what must not come


class Slow:
    """The store of a process that is slow to read."""

    def __init__(self, store: TCPStore, until: Event) -> None:
        self.store, self.until = store, until
        self.was_first = False

    def multi_get(self, keys: list[str]) -> Any:
        self.was_first = not self.until.wait(SHORT)
        return self.store.multi_get(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_nobody_goes_on_before_all_have_read() -> None:
    """Seen with two runs under one name and `mingpt launch`: the head ended with 64, and the other node with 70, for
    want of the store, before it had removed its probe."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    has_read, gathered = Event(), dict[int, list[Any]]()
    slow = Slow(client, has_read)

    def act(rank: int) -> None:
        gathered[rank] = gather_over((server, slow)[rank], rank, 2, 60)(rank)  # type: ignore[arg-type]
        if rank == 0:
            has_read.set()

    threads = [Thread(target=act, args=[rank]) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gathered == {0: [0, 1], 1: [0, 1]}
    assert slow.was_first
