"""Tests the links between nodes: is each open at a free port, and do large packets pass?"""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

LIMIT = 3.0  # seconds for connecting, and for each answer
LARGE_BYTES = 2**18


class Echo:
    """Listens at a free port, as training's processes do, and sends back what comes.

    name: sent first on each connection, so that the other side knows that it has reached this node.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self.listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=128)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            threading.Thread(target=self._echo, args=self.listener.accept()[:1], daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(60)
            connection.sendall(f"{self.name}\n".encode())
            while data := connection.recv(65536):
                connection.sendall(data)


def probe(rank: int, address: str, port: int, name: str) -> dict[str, Any]:
    """error: why the link to a node's Echo can't be used, "" if it can. large: whether large packets pass.

    A bad one is tested a second time, since a node that is busy starting may answer late.
    """
    for _ in range(2):
        error, large = _try(address, port, name)
        if large:
            break
    return {"rank": rank, "address": address, "error": error, "large": large}


def _try(address: str, port: int, name: str) -> tuple[str, bool]:
    try:
        with socket.create_connection((address, port), LIMIT) as s:
            if s.makefile("rb").readline(len(name) + 1) != f"{name}\n".encode():
                return "another program answers there", False
            threading.Thread(target=_send, args=(s,), daemon=True).start()
            with suppress(TimeoutError):
                return "", bool(s.recv(65536))  # all of it may take too long on a slow link
            return "", False
    except OSError as error:
        return "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error), False


def _send(s: socket.socket) -> None:
    with suppress(OSError):  # closed meanwhile
        s.sendall(bytes(LARGE_BYTES))


def probe_all(wanted: list[tuple[int, str, int, str]]) -> list[dict[str, Any]]:
    """Test all links at the same time. wanted: the arguments of `probe`."""
    with ThreadPoolExecutor(max(1, len(wanted))) as pool:
        return list(pool.map(lambda arguments: probe(*arguments), wanted))


def why_unreachable(host: str, port: int) -> tuple[bool, str, str]:
    """Why the head does not answer: (whether the user must fix something, what is wrong, what to do)."""
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        return True, f"{host}: {error.strerror or error}", "correct the name, or give the head's address"
    where = host if host == address else f"{host} ({address})"

    def outcome(port: int) -> OSError | None:
        try:
            socket.create_connection((host, port), 2 * LIMIT).close()  # ARP gives a host up after 3 s
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
