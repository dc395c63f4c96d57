"""Strangers at preflight's port: what they write is not read, and the nodes meet all the same."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.pool import AsyncResult
from typing import Any

import pytest
from torch.distributed import TCPStore

from mingpt.errors import UserError
from mingpt.preflight import meeting
from mingpt.preflight.helper import Helper, Unreached, answer
from mingpt.world.secret import REFUSED, SECRET, signed
from node_kit import free_port

LIMIT = 100.0
NONSENSE = {
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
    "many bytes": b"x" * 1_000_000,
    "nothing": b"",
}


helpers = list[Helper]()


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    while helpers:
        helpers.pop().end()


class Node:
    """The side of preflight that meets the others. Rank None: the head chooses one."""

    def __init__(self, port: int, rank: int | None, size: int = 2) -> None:
        self.helper = Helper()
        helpers.append(self.helper)
        own = "127.0.0.1" if rank == 0 else None
        self.meets = self.helper.ask(meeting.meet, "127.0.0.1", port, own, rank, size, 30.0)

    def gathers(self, value: object, seconds: float = LIMIT) -> AsyncResult[list[object]]:
        return self.helper.ask(meeting.gather, value, seconds)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def head(port: int) -> Node:
    node = Node(port, 0)
    assert answer(node.meets, LIMIT) == 0
    return node


@pytest.mark.parametrize("raw", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_and_silence_hold_nobody(raw: bytes, head: Node, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as loud, socket.create_connection(("127.0.0.1", port)):
        with suppress(OSError):  # the store need not hear it to its end
            loud.sendall(raw)
        node = Node(port, 1)
        gathered = [head.gathers("a"), node.gathers("b")]
        assert [answer(asked, LIMIT) for asked in gathered] == [["a", "b"]] * 2


def test_what_a_stranger_writes_in_a_nodes_place_is_refused(head: Node, port: int) -> None:
    stranger: Any = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
    forged = signed("another secret than the job's", "preflight 0/1", b'["forged"]')
    stranger.set("0/1", forged)
    assert answer(head.gathers("a", 1.0), LIMIT) == ["a", None]
    stranger.set("1/1", stranger.get("size"))  # signed with the secret, but as something else
    assert answer(head.gathers("a", 1.0), LIMIT) == ["a", None]
    stranger.set("size", forged)
    with pytest.raises(UserError) as refused:
        answer(Node(port, 1).meets, LIMIT)
    assert str(refused.value) == REFUSED


def test_another_secret_is_told(head: Node, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "another secret than the head's")
    with pytest.raises(UserError, match=SECRET):
        answer(Node(port, 1).meets, LIMIT)


def test_another_number_of_nodes_is_refused(head: Node, port: int) -> None:
    with pytest.raises(UserError, match=r" 2 nodes, .* 3"):
        answer(Node(port, 1, 3).meets, LIMIT)


def test_nodes_without_numbers_get_them_until_there_are_none(head: Node, port: int) -> None:
    assert answer(Node(port, None).meets, LIMIT) == 1
    with pytest.raises(Unreached, match=r"^2 nodes"):
        answer(Node(port, None).meets, LIMIT)


def test_a_program_that_never_answers_is_given_up(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)), pytest.raises(Unreached, match="no answer within 3 s"):
        answer(Node(port, 1).meets, 3.0)
