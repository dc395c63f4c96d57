"""The nodes meet at the head's port, before training does at the same one, and tell each other short things.

One connection from each node to the head; `gather` gives every node everybody's value. Every wait ends: a node that
does not come, or falls silent, is None from then on.
"""

import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mingpt.console import complain
from mingpt.world import network

LONGEST = 2**20  # bytes of a message; a stranger may talk to the port
# Short segments pass where large ones vanish, so that an MTU black hole can still be told.
SEGMENT = 400
HELLO_SECONDS = 3.0
SLACK_SECONDS = 5.0  # what a node gives the head beyond the head's own limit


class Unreached(Exception):
    """The head was not reached, or lost."""


class Refused(Exception):
    """The head is there, and expects something else."""


def shorten_segments(s: socket.socket) -> None:
    if hasattr(socket, "TCP_MAXSEG"):
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT)


@dataclass
class Line:
    """A connection that carries JSON values, a line each."""

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
        except RecursionError as error:  # nested a thousand times: a stranger's
            raise ValueError("what it sends is no message of a preflight") from error

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
    """This node's part. lines: to each other node (head), or to the head. clock: how far the head's is ahead, in s."""

    rank: int
    size: int
    lines: dict[int, Line] = field(default_factory=dict)
    clock: float = 0.0

    def gather(self, value: Any, seconds: float) -> list[Any]:
        """Everybody's value by rank; None of those that have not come or not answered. Raises Unreached."""
        deadline = time.monotonic() + seconds
        if self.rank:
            try:
                self.lines[0].send(value, seconds)
                return list(self.lines[0].receive(seconds + SLACK_SECONDS))
            except (OSError, ValueError, TypeError) as error:
                raise Unreached(f"the head's preflight has ended, or answers no more ({error})") from error
        values = [value, *[None] * (self.size - 1)]
        for rank, line in list(self.lines.items()):
            try:
                values[rank] = line.receive(max(0.01, deadline - time.monotonic()))
                if isinstance(value, (dict, list)) and not isinstance(values[rank], type(value)):
                    values[rank] = None
                    raise ValueError("what it sends is no message of a preflight")
            except (OSError, ValueError):
                self.lines.pop(rank).socket.close()
        for rank, line in list(self.lines.items()):
            try:
                line.send(values, SLACK_SECONDS)
            except OSError:
                self.lines.pop(rank).socket.close()
        return values

    def own_address(self) -> str | None:
        """What this node is called where the nodes have met, whatever its name means to itself."""
        return next((plain(line.socket.getsockname()[0]) for line in self.lines.values()), None)

    def close(self) -> None:
        """The others first: who closes first keeps the port in TIME_WAIT, and training wants the head's at once."""
        for line in self.lines.values():
            if self.rank == 0:
                line.socket.settimeout(1)
                with suppress(OSError):
                    line.socket.recv(1)
            line.socket.close()


def host(address: str, port: int, size: int, seconds: float) -> Meeting:
    """On the head: let the others in, until all are there or the time is over. Raises OSError if the port is taken.

    address: this node's, as the others call it. What strangers send is told in a line each, and changes nothing.
    """
    with network.listen(address, port, several=True) as listener:
        shorten_segments(listener)
        meeting, deadline = Meeting(0, size), time.monotonic() + seconds
        while len(meeting.lines) < size - 1 and (left := deadline - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                accepted, (stranger, *_) = listener.accept()
            except OSError:  # nobody came
                continue
            line = Line(accepted)
            try:
                _let_in(meeting, line)
            except (OSError, ValueError) as error:
                complain(f"preflight: a connection from {plain(str(stranger))} is refused: {error}")
                line.socket.close()
    return meeting


def _let_in(meeting: Meeting, line: Line) -> None:
    """Raises OSError or ValueError if this is none of the nodes, which has been told why if it can be one."""
    hello = line.receive(HELLO_SECONDS)
    asked, size = (hello.get("rank"), hello.get("size")) if isinstance(hello, dict) else (None, None)
    if type(size) is not int or type(asked) not in (int, type(None)):
        raise ValueError("what it sends is no message of a preflight")
    taken = [r for r, other in meeting.lines.items() if not other.ended]
    free = [r for r in range(1, meeting.size) if r not in taken]
    rank = asked if asked is not None else free[0]
    refused = ""
    if size != meeting.size or not 1 <= rank < size:
        refused = f"the head expects {meeting.size} nodes, and this node {size}"
    elif rank in taken:
        refused = f"another node has the number {rank}"
    if refused:
        line.send({"refused": refused}, HELLO_SECONDS)
        raise ValueError(refused)
    line.send({"rank": rank, "time": time.time()}, HELLO_SECONDS)
    meeting.lines[rank] = line


def visit(host: str, port: int, rank: int | None, size: int, seconds: float) -> Meeting:
    """On another node: go to the head, again and again until it is there. Raises Unreached."""
    deadline, tries = time.monotonic() + seconds, 0
    while True:
        line = None
        try:
            line = Line(_connect(host, port, max(0.5, min(HELLO_SECONDS, deadline - time.monotonic()))))
            asked = time.time()
            line.send({"rank": rank, "size": size}, HELLO_SECONDS)
            answer = line.receive(HELLO_SECONDS)
            if "refused" in answer:
                raise Refused(answer["refused"])
            clock = float(answer["time"]) - (asked + time.time()) / 2
            return Meeting(int(answer["rank"]), size, {0: line}, clock)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if line:
                line.socket.close()
            tries += 1
            if time.monotonic() > deadline:
                raise Unreached(str(error)) from error
            time.sleep(min(0.2, 0.02 * tries))


def plain(address: str) -> str:
    """An IPv4 address as such, that came through a socket for both kinds."""
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


def what_stops(host: str, port: int) -> tuple[bool, str, str]:
    """Why nobody was met at a host's port: whether the user must act there, what is seen, and what to do."""
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
        text = f"something answers at port {port} of {where}, but no preflight that waits for this node"
        return False, text, "stop it, or choose another port"
    if isinstance(seen, ConnectionRefusedError):
        advice = "see whether that node is the head, and what its log says; start preflight there, too"
        return False, f"nobody listens at port {port} of {where}", advice
    if isinstance(outcome(9), ConnectionRefusedError):  # nobody uses it; a host that is there says so
        advice = "open all TCP ports between the nodes (security group, ufw, iptables)"
        return True, f"{where} is up, but does not answer at port {port}: a firewall drops what comes for it", advice
    advice = "see whether that node is up, whether the address is right, and whether a firewall drops all that comes"
    return False, f"no answer at all from {where} ({seen.strerror or seen})", advice
