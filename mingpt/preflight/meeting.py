"""The nodes meet at the head's port, which training will use later, and exchange short messages.

Each node has one connection, to the head. `gather` is an all-gather over it. Every wait has a limit. The value of a
node that does not come, or stops answering, is None from then on.
"""

import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mingpt.console import complain
from mingpt.world import network

LONGEST = 2**20  # bytes of a message; any program may connect to the port
NO_MESSAGE = "it sent something that is not a message of preflight"
SEGMENT = 400  # bytes of a TCP segment: preflight's own messages pass where an MTU black hole swallows large packets
HELLO_SECONDS = 3.0  # for connecting, and for each message of the greeting
SLACK_SECONDS = 5.0  # that a node waits longer for the head than the head waits for the nodes
SHORT_SECONDS = 10  # for a value that every node has ready


class Unreached(Exception):
    """The head can't be reached, or has gone."""


class Refused(Exception):
    """The head has refused this node; the message says why."""


def shorten_segments(s: socket.socket) -> None:
    if hasattr(socket, "TCP_MAXSEG"):
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)


@dataclass
class Connection:
    """A TCP connection that carries JSON values, one a line."""

    socket: socket.socket
    rest: bytes = b""

    def send(self, value: Any, seconds: float) -> None:
        self.socket.settimeout(max(0.01, seconds))
        self.socket.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, seconds: float) -> Any:
        """Raises OSError or ValueError."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self.rest:
            self.socket.settimeout(max(0.01, deadline - time.monotonic()))
            piece = self.socket.recv(65536)
            if not piece or len(self.rest) > LONGEST:
                raise ConnectionError("the connection has ended")
            self.rest += piece
        raw, _, self.rest = self.rest.partition(b"\n")
        try:
            return json.loads(raw)
        except RecursionError as error:  # nested thousands of times: not from a node
            raise ValueError(NO_MESSAGE) from error

    @property
    def ended(self) -> bool:
        """Whether the other side has closed it."""
        self.socket.settimeout(0)
        try:
            return self.socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


@dataclass
class Meeting:
    """The nodes that have met, as this one knows them.

    connections: by rank; the head has one to each other node, any other node one to the head. clock: seconds that the
    head's clock is ahead of this node's.
    """

    rank: int
    size: int
    connections: dict[int, Connection] = field(default_factory=dict)
    clock: float = 0.0

    def gather(self, value: Any, seconds: float) -> list[Any]:
        """All-gather: the values by rank; None for a node that has not come or not answered within `seconds`.

        Raises Unreached, on a node that is not the head, if the head does not answer.
        """
        deadline = time.monotonic() + seconds
        if self.rank:
            try:
                self.connections[0].send(value, seconds)
                return list(self.connections[0].receive(seconds + SLACK_SECONDS))
            except (OSError, ValueError, TypeError) as error:
                raise Unreached(f"the head's preflight has ended or stopped answering ({error})") from error
        values = [value, *[None] * (self.size - 1)]
        for rank, connection in list(self.connections.items()):
            try:
                values[rank] = connection.receive(max(0.01, deadline - time.monotonic()))
                if isinstance(value, (dict, list)) and not isinstance(values[rank], type(value)):
                    values[rank] = None
                    raise ValueError(NO_MESSAGE)
            except (OSError, ValueError):
                self.connections.pop(rank).socket.close()
        for rank, connection in list(self.connections.items()):
            try:
                connection.send(values, SLACK_SECONDS)
            except OSError:
                self.connections.pop(rank).socket.close()
        return values

    @property
    def others(self) -> int:
        """How many other nodes are here: those that have closed their connection are not."""
        return sum(not connection.ended for connection in self.connections.values())

    def own_address(self) -> str | None:
        """This node's address as the other side of a connection sees it; None if there is no connection."""
        return next((plain(connection.socket.getsockname()[0]) for connection in self.connections.values()), None)

    def close(self) -> None:
        """Close the connections; the head waits up to 1 s for the other side to close first.

        The side that closes first keeps its port in TIME_WAIT, and training needs the head's port at once.
        """
        for connection in self.connections.values():
            if self.rank == 0:
                connection.socket.settimeout(1)
                with suppress(OSError):
                    connection.socket.recv(1)
            connection.socket.close()


def host(address: str, port: int, size: int, seconds: float) -> Meeting:
    """On the head: accept the other nodes until all have come or `seconds` have passed.

    address: this node's, as the others know it. A connection that is not from a node is closed and logged in one line.
    Raises OSError if the port can't be opened.
    """
    with network.listen(address, port, several=True) as listener:
        shorten_segments(listener)
        meeting, deadline = Meeting(0, size), time.monotonic() + seconds
        # A node that has given up, since this one was busy with a stranger, comes again.
        while meeting.others < size - 1 and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                accepted, (peer, *_) = listener.accept()
            except OSError:  # no connection came
                continue
            connection = Connection(accepted)
            try:
                _let_in(meeting, connection)
            except (OSError, ValueError) as error:
                complain(f"preflight: a connection from {plain(str(peer))} is refused: {error}")
                connection.socket.close()
    return meeting


def _let_in(meeting: Meeting, connection: Connection) -> None:
    """Add a node to the meeting. Raises OSError or ValueError if it is refused; a node is sent the reason first."""
    hello = connection.receive(HELLO_SECONDS)
    asked, size = (hello.get("rank"), hello.get("size")) if isinstance(hello, dict) else (None, None)
    if type(size) is not int or type(asked) not in (int, type(None)):
        raise ValueError(NO_MESSAGE)
    taken = [r for r, other in meeting.connections.items() if not other.ended]
    free = [r for r in range(1, meeting.size) if r not in taken]
    rank = asked if asked is not None else free[0]
    refused = ""
    if size != meeting.size or not 1 <= rank < size:
        refused = f"the head expects {meeting.size} nodes, and this node {size}"
    elif rank in taken:
        refused = f"another node has the number {rank}"
    if refused:
        connection.send({"refused": refused}, HELLO_SECONDS)
        raise ValueError(refused)
    connection.send({"rank": rank, "time": time.time()}, HELLO_SECONDS)
    meeting.connections[rank] = connection


def join(host: str, port: int, rank: int | None, size: int, seconds: float) -> Meeting:
    """On another node: connect to the head, with retries for `seconds`. rank: None: the head chooses one.

    Raises Refused if the head does not accept this node, Unreached if it does not answer.
    """
    deadline, tries = time.monotonic() + seconds, 0
    while True:
        connection = None
        try:
            connection = Connection(_connect(host, port, max(0.5, min(HELLO_SECONDS, deadline - time.monotonic()))))
            asked = time.time()
            connection.send({"rank": rank, "size": size}, HELLO_SECONDS)
            answer = connection.receive(HELLO_SECONDS)
            if "refused" in answer:
                raise Refused(answer["refused"])
            clock = float(answer["time"]) - (asked + time.time()) / 2
            return Meeting(int(answer["rank"]), size, {0: connection}, clock)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if connection:
                connection.socket.close()
            tries += 1
            if time.monotonic() > deadline:
                raise Unreached(str(error)) from error
            time.sleep(min(0.2, 0.02 * tries))


def plain(address: str) -> str:
    """An address without the prefix that a dual-stack socket puts before an IPv4 address."""
    return address.removeprefix("::ffff:")


def _connect(host: str, port: int, seconds: float) -> socket.socket:
    last: OSError = OSError("no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        s = socket.socket(family, kind, protocol)
        try:
            shorten_segments(s)
            s.settimeout(seconds)
            s.connect(address)
            return s
        except OSError as error:
            s.close()
            last = error
    raise last


def why_unreachable(host: str, port: int) -> tuple[bool, str, str]:
    """Why the head does not answer: (whether the user must fix something, what is wrong, what to do)."""
    try:
        address = plain(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])  # type: ignore[arg-type]
    except OSError as error:
        return True, f"{host}: {error.strerror or error}", "correct the name, or give the head's address"
    where = host if host == address else f"{host} ({address})"

    def outcome(port: int) -> OSError | None:
        try:
            _connect(host, port, HELLO_SECONDS).close()
        except OSError as error:
            return error
        return None

    seen = outcome(port)
    if seen is None:
        text = f"a program answers at port {port} of {where}, but it is not a preflight that waits for this node"
        return False, text, "stop it, or choose another port"
    if isinstance(seen, ConnectionRefusedError):
        advice = "see whether that node is the head, and what its log says; start preflight there, too"
        return False, f"nothing listens at port {port} of {where}", advice
    if isinstance(outcome(9), ConnectionRefusedError):  # the discard port, which is closed: a host that is up refuses
        advice = "open all TCP ports between the nodes (security group, ufw, iptables)"
        return True, f"{where} is up, but does not answer at port {port}: a firewall drops what comes for it", advice
    advice = "see whether that node is up, whether the address is right, and whether a firewall drops all that comes"
    return False, f"no answer at all from {where} ({seen.strerror or seen})", advice
