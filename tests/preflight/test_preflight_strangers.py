"""Strangers at preflight's port: what they write is not read, and the nodes meet all the same."""

import socket
from contextlib import suppress
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest
from torch.distributed import TCPStore

from mingpt.errors import UserError
from mingpt.preflight import meeting
from mingpt.preflight.helper import Helper, Unreached, answer
from mingpt.preflight.meeting import Meeting
from mingpt.world.secret import REFUSED, SECRET, signed
from tests.kits.node_kit import free_port


def meet(port: int, rank: int | None, size: int = 2) -> Meeting:
    """The side of preflight that meets the others. Rank None: the head chooses one."""
    meeting.meet("127.0.0.1", port, "127.0.0.1" if rank == 0 else None, rank, size, 30.0)
    return meeting._met


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def head(port: int) -> Meeting:
    return meet(port, 0)


@pytest.fixture
def stranger(head: Meeting, port: int) -> Any:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))


@pytest.mark.parametrize("raw", [b"GET / HTTP/1.1\r\n\r\n", b"x" * 1_000_000], ids=["HTTP", "many bytes"])
def test_nonsense_and_silence_hold_nobody(raw: bytes, head: Meeting, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as loud, socket.create_connection(("127.0.0.1", port)):
        with suppress(OSError):  # the store need not hear it to its end
            loud.sendall(raw)
        nodes = [head, meet(port, 1)]
        with ThreadPool(2) as pool:
            assert pool.map(lambda node: node.gather(node.rank, 100.0), nodes) == [[0, 1], [0, 1]]


def test_what_a_stranger_writes_in_a_nodes_place_is_refused(head: Meeting, port: int, stranger: Any) -> None:
    """Nor is a value that is signed, but as something else."""
    forged = signed("another secret than the job's", "preflight 0/1", b'["forged"]')
    for key, value in (("0/1", forged), ("1/1", stranger.get("size"))):
        stranger.set(key, value)
        assert head.gather("a", 1.0) == ["a", None]


def test_another_secret_is_told(head: Meeting, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "another secret than the head's")
    with pytest.raises(UserError) as refused:
        meet(port, 1)
    assert str(refused.value) == REFUSED


def test_another_number_of_nodes_is_refused(head: Meeting, port: int) -> None:
    with pytest.raises(UserError, match=r" 2 nodes, .* 3"):
        meet(port, 1, 3)


def test_nodes_without_numbers_get_them_until_there_are_none(head: Meeting, port: int) -> None:
    assert meet(port, None).rank == 1
    with pytest.raises(Unreached, match=r"^2 nodes"):
        meet(port, None)


def test_a_program_that_never_answers_is_given_up(port: int) -> None:
    helper = Helper()
    try:
        with socket.create_server(("127.0.0.1", port)), pytest.raises(Unreached, match=r"within 1 s"):
            answer(helper.ask(meeting.meet, "127.0.0.1", port, None, 1, 2, 30.0), 1.0)
    finally:
        helper.end()
