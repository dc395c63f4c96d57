"""Measures the links between nodes: is each open, do large packets pass, the round trip, the share of lost packets."""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

CONNECT_SECONDS = 3.0
LARGE_BYTES, LARGE_SECONDS = 2**18, 3.0
PINGS = 7
# As many UDP packets as a socket's buffer holds while the other node is busy.
PACKETS, PACKET_BYTES, LOSS_SECONDS = 400, 64, 1.5
LOST_SHARE = 0.005  # from which on it is bad


class Echo:
    """Listens at a free port, as training's processes do, and sends back what comes; the same on a UDP port.

    name: sent first on each connection, so that the other side knows that it has reached this node.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self.listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=128)
        self.packets = socket.socket(family, socket.SOCK_DGRAM)
        if both:
            self.packets.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        self.packets.bind(("", 0))
        self.ports = self.listener.getsockname()[1], self.packets.getsockname()[1]
        for work in (self._accept, self._return):
            threading.Thread(target=work, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(60)
            connection.sendall(f"{self.name}\n".encode())
            while data := connection.recv(65536):
                connection.sendall(data)

    def _return(self) -> None:
        while True:
            data, sender = self.packets.recvfrom(2048)
            with suppress(OSError):
                self.packets.sendto(data, sender)


@dataclass
class Link:
    """The link to one address of one node."""

    rank: int
    address: str
    error: str = ""  # why it can't be used; empty: it can
    rtt: float = 0.0  # seconds
    large: bool = True  # whether large packets pass
    loss: float | None = None  # share of UDP packets; None: UDP is not answered at all


def probe(rank: int, address: str, ports: tuple[int, int], name: str) -> Link:
    """Measure a link; a bad one a second time, since a node that is busy starting may answer late.

    ports: of the other node's Echo, for TCP and UDP. name: of that Echo.
    """
    link = _try(rank, address, ports, name)
    bad = link.error or not link.large or (link.loss or 0) >= LOST_SHARE
    return _try(rank, address, ports, name) if bad else link


def _try(rank: int, address: str, ports: tuple[int, int], name: str) -> Link:
    link = Link(rank, address)
    try:
        with socket.create_connection((address, ports[0]), CONNECT_SECONDS) as s:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _receive(s, len(name) + 1) != f"{name}\n".encode():
                link.error = "another program answers there"
                return link
            link.rtt = min(_ping(s) for _ in range(PINGS))  # what the network takes: a busy node adds to others
            link.large = _passes(s)
        if link.large:
            link.loss = _loss(address, ports[1])
    except OSError as error:
        link.error = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
    return link


def _receive(s: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := s.recv(count - len(data))):
        data += piece
    return data


def _ping(s: socket.socket) -> float:
    begun = time.monotonic()
    s.sendall(b"?")
    s.recv(1)
    return time.monotonic() - begun


def _passes(s: socket.socket) -> bool:
    """Whether a first part of a large message comes back. All of it may take too long on a slow link."""
    threading.Thread(target=_send, args=(s, LARGE_BYTES), daemon=True).start()
    s.settimeout(LARGE_SECONDS)
    try:
        return bool(s.recv(65536))
    except TimeoutError:
        return False


def _send(s: socket.socket, count: int) -> None:
    with suppress(OSError):  # closed meanwhile
        s.sendall(bytes(count))


def _loss(address: str, port: int) -> float | None:
    """The share of packets that don't come back; None if none do: UDP may be closed, and training does not use it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
        s.connect((address, port))
        came: set[bytes] = set()
        deadline = 0.0
        with suppress(OSError):
            for number in range(PACKETS):
                s.send(number.to_bytes(PACKET_BYTES, "big"))
                if number % 20 == 19:
                    time.sleep(0.005)
            deadline = time.monotonic() + LOSS_SECONDS
            while len(came) < PACKETS:
                s.settimeout(max(0.0, deadline - time.monotonic()))  # at the end only what lies there already
                came.add(s.recv(2048))
        return 1 - len(came) / PACKETS if came else None


def probe_all(wanted: list[tuple[int, str, tuple[int, int], str]]) -> list[dict[str, Any]]:
    """Measure all links at the same time. wanted: the arguments of `probe`. Returns each Link as a dict."""
    found: list[Link] = []
    threads = [threading.Thread(target=lambda w=w: found.append(probe(*w)), daemon=True) for w in wanted]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2 * (CONNECT_SECONDS + LARGE_SECONDS + LOSS_SECONDS) + 3
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    seen = {(link.rank, link.address) for link in list(found)}
    silent = [Link(rank, address, "no answer") for rank, address, _, _ in wanted if (rank, address) not in seen]
    return [asdict(link) for link in [*found, *silent]]
