"""Strangers at preflight's port: each is told in one line, and the nodes meet all the same."""

import json
import socket
import threading
from contextlib import suppress

import pytest

from mingpt.preflight.meeting import LONGEST, Connection, Meeting, Refused, host, join
from node_kit import free_port, listening, wait_until

NONSENSE = {
    "nested": b"[" * 100_000 + b"]" * 100_000 + b"\n",
    "infinite rank": b'{"rank": Infinity, "size": 2}\n',
    "no number": b'{"rank": NaN, "size": 2}\n',
    "a rank that is none": b'{"rank": true, "size": 2}\n',
    "many digits": b'{"rank": ' + b"9" * 10_000 + b', "size": 2}\n',
    "a list": b"[]\n",
    "no JSON": b"\x80\x04GET / HTTP/1.1\r\n\r\n",
    "no end": b"x" * (LONGEST + 100_000),
    "nothing": b"",
}


class Head(threading.Thread):
    def __init__(self, size: int = 2) -> None:
        super().__init__(daemon=True)
        self.port, self.size, self.meeting, self.error = free_port(), size, Meeting(0, size), ""
        self.start()
        wait_until(lambda: listening(self.port), "the head listens")

    def run(self) -> None:
        try:
            self.meeting = host("127.0.0.1", self.port, self.size, 60)
        except Exception as error:
            self.error = repr(error)


@pytest.mark.parametrize("raw", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_refused_and_the_nodes_meet(raw: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    head = Head()
    with socket.create_connection(("127.0.0.1", head.port)) as s:
        with suppress(OSError):  # the head need not hear it to its end
            s.sendall(raw)
            s.shutdown(socket.SHUT_WR)
        meeting = join("127.0.0.1", head.port, 1, 2, 200)
    head.join(200)
    assert (head.error, list(head.meeting.connections), meeting.rank) == ("", [1], 1)
    assert "preflight: a connection from 127.0.0.1 is refused: " in capfd.readouterr().err
    for part in (head.meeting, meeting):
        part.close()


def test_a_number_that_is_taken_is_refused_until_its_node_has_gone() -> None:
    head = Head(3)
    port = head.port
    first = join("127.0.0.1", port, 1, 3, 200)
    with pytest.raises(Refused, match="another node has the number 1"):
        join("127.0.0.1", port, 1, 3, 200)
    first.connections[0].socket.close()
    came = list[Meeting]()

    def comes() -> bool:  # once the head's side has heard that the first has gone
        with suppress(Refused):
            came.append(join("127.0.0.1", port, 1, 3, 200))
        return bool(came)

    wait_until(comes, "the node comes again", limit=50)
    [again] = came
    other = join("127.0.0.1", port, None, 3, 200)
    head.join(200)
    assert (head.error, again.rank, other.rank, sorted(head.meeting.connections)) == ("", 1, 2, [1, 2])
    for part in (again, other, head.meeting):
        part.close()


def test_a_node_that_has_given_up_while_a_stranger_held_the_head_comes_again() -> None:
    head = Head()
    stranger, given_up = (socket.create_connection(("127.0.0.1", head.port)) for _ in range(2))
    with stranger, given_up:
        given_up.sendall(b'{"rank": 1, "size": 2}\n')
        given_up.close()
    meeting = join("127.0.0.1", head.port, 1, 2, 20)
    head.join(200)
    assert (head.error, meeting.rank, head.meeting.others) == ("", 1, 1)
    for part in (head.meeting, meeting):
        part.close()


@pytest.mark.parametrize("told", ["[]", "7", "[" * 100_000 + "]" * 100_000, '"x"'])
def test_a_node_that_turns_out_to_be_none_is_as_one_that_has_gone(told: str) -> None:
    near, far = socket.socketpair()
    meeting = Meeting(0, 2, {1: Connection(near)})
    far.sendall(told.encode() + b"\n")
    assert meeting.gather({"rank": 0}, 5) == [{"rank": 0}, None]
    assert meeting.connections == {}
    far.close()


def test_what_a_node_tells_arrives() -> None:
    near, far = socket.socketpair()
    far.sendall(json.dumps({"rank": 1}).encode() + b"\n")
    assert Meeting(0, 2, {1: Connection(near)}).gather({"rank": 0}, 5) == [{"rank": 0}, {"rank": 1}]
    near.close()
    far.close()
