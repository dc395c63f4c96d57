"""Tests the links between nodes: is each open at a free port, and do large packets pass?"""

import socket
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from mingpt.preflight.finding import Finding

LIMIT = 3.0  # seconds for connecting, and for each answer
LARGE_BYTES = 2**18
MOST_AT_ONCE = 64  # links that a node tests at the same time: more than it has
PORTS = "open all TCP ports between the nodes (security group, ufw, iptables)"
MTU = (
    "lower the interface's MTU until they pass (ip link set dev NAME mtu 1400), or let ICMP's 'fragmentation needed' "
    "through"
)


class Echo:
    """Listens at a free port, as training's processes do; sends a name, so that the other side knows that it has
    reached this node, and then as much as fills large packets.
    """

    def __init__(self, name: str) -> None:
        self.name = f"{name}\n".encode()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self.listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=128)
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            threading.Thread(target=self._answer, args=self.listener.accept()[:1], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(60)
            connection.sendall(self.name)
            connection.sendall(bytes(LARGE_BYTES))
            connection.recv(1)  # until the other side has closed it: closed here, what is under way might be dropped


def _error(address: str, port: int, name: str) -> str | None:
    """Why the link to a node's Echo can't be used, "" if large packets are lost; None: it is good."""
    try:
        with socket.create_connection((address, port), LIMIT) as s, s.makefile("rb") as stream:
            if stream.readline(len(name) + 1) != f"{name}\n".encode():
                return "another program answers there"
            try:
                return None if stream.read(1) else ""  # all of it may take too long on a slow link
            except OSError:
                return ""
    except OSError as error:
        return "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)


def _finding(node: str, peer: Mapping[str, Any], address: str, label: str) -> list[Finding]:
    """label: the variable of the peer's environment that alone chooses this address, if one does.

    A bad link is tested a second time, since a node that is busy starting may answer late.
    """
    host = peer["facts"]["host"]
    error = _error(address, peer["port"], peer["identity"])
    if error is not None:
        error = _error(address, peer["port"], peer["identity"])
    if error is None:
        return []
    if label and error:
        # The peer's own setting is wrong, and so the finding is the peer's.
        text = f"{label} leads to {address}, where {node} does not reach it ({error})"
        advice = "unset it, then the interface that leads to the other nodes is found"
        return [Finding("problem", host, "interface", text, advice)]
    where = f"{host} ({address})"
    if error:
        text = f"no way to {where} at a free port ({error}), though they have met at the head's"
        return [Finding("problem", node, "ports", text, PORTS)]
    if not label:
        text = f"large packets to or from {where} are lost, small ones pass"
        return [Finding("problem", node, "mtu", text, MTU)]
    return []


def findings(node: str, peers: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Test all links of this node at the same time. peers: what they have sent."""
    tests = list[Future[list[Finding]]]()
    # Each may take several limits: one after another, a node that is lost would hold the whole preflight up.
    with ThreadPoolExecutor(max_workers=MOST_AT_ONCE) as pool:
        for peer in peers:
            for address, label in peer["addresses"]:
                tests.append(pool.submit(_finding, node, peer, address, label))
    findings: list[Finding] = []
    for test in tests:
        findings += test.result()
    return findings


def why_unreachable(host: str, port: int, node: str) -> Finding:
    """Why the head does not answer: a name, a closed port, a firewall, a host that is down."""
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        advice = "correct the name, or give the head's address"
        return Finding("problem", node, "ports", f"{host}: {error.strerror or error}", advice)
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
        return Finding("unreachable", node, "ports", text, "stop it, or choose another port")
    if isinstance(seen, ConnectionRefusedError):
        advice = "see whether that node is the head, and what its log says; start preflight there, too"
        return Finding("unreachable", node, "ports", f"nothing listens at port {port} of {where}", advice)
    if isinstance(outcome(9), ConnectionRefusedError):  # the discard port, which is closed: a host that is up refuses
        text = f"{where} is up, but does not answer at port {port}: a firewall drops what comes for it"
        return Finding("problem", node, "ports", text, PORTS)
    advice = "see whether that node is up, whether the address is right, and whether a firewall drops all that comes"
    return Finding("unreachable", node, "ports", f"no answer at all from {where} ({seen.strerror or seen})", advice)
