"""The ways between nodes: is each open, do large messages pass, how long does a round trip take, what is lost?"""

import socket
import statistics
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

CONNECT_SECONDS = 3.0
LARGE_BYTES, LARGE_SECONDS = 2**18, 3.0
PINGS = 7
PACKETS, PACKET_BYTES, LOSS_SECONDS = (
    400,
    64,
    1.5,
)  # as many as fit into a socket's buffer when nobody reads for a while


class Echo:
    """A listener at a free port, as training's processes have, that sends back what comes; another one for UDP."""

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
class Way:
    """What was met on the way to one address of one node. loss: None where UDP is not answered at all."""

    rank: int
    address: str
    error: str = ""  # why it is closed
    rtt: float = 0.0
    large: bool = True
    loss: float | None = None


def probe(rank: int, address: str, ports: tuple[int, int], name: str) -> Way:
    """Twice, if need be: a node that has much to do while others start may answer late."""
    way = _try(rank, address, ports, name)
    return _try(rank, address, ports, name) if way.error or not way.large else way


def _try(rank: int, address: str, ports: tuple[int, int], name: str) -> Way:
    way = Way(rank, address)
    try:
        with socket.create_connection((address, ports[0]), CONNECT_SECONDS) as s:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            met = _receive(s, len(name) + 1)
            if met != f"{name}\n".encode():
                way.error = "another program answers there"
                return way
            way.rtt = statistics.median(_ping(s) for _ in range(PINGS))
            way.large = _passes(s)
        if way.large:
            way.loss = _loss(address, ports[1])
    except OSError as error:
        way.error = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
    return way


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
    """Whether any of a large message comes back. (All of it may take longer, on a slow way.)"""
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
    """The share of packets that don't come back; None if none do: UDP may be closed, and training needs none."""
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
            while len(came) < PACKETS and (left := deadline - time.monotonic()) > 0:
                s.settimeout(left)
                came.add(s.recv(2048))
        return 1 - len(came) / PACKETS if came else None


def probe_all(wanted: list[tuple[int, str, tuple[int, int], str]]) -> list[dict[str, Any]]:
    """Every way at the same time."""
    found: list[Way] = []
    threads = [threading.Thread(target=lambda w=w: found.append(probe(*w)), daemon=True) for w in wanted]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2 * (CONNECT_SECONDS + LARGE_SECONDS) + LOSS_SECONDS + 3
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    seen = {(way.rank, way.address) for way in list(found)}
    silent = [Way(rank, address, "no answer") for rank, address, _, _ in wanted if (rank, address) not in seen]
    return [asdict(way) for way in [*found, *silent]]
