"""Finds the network interface that leads to the other nodes, by the kernel's routing table; opens sockets.

Interface names differ between nodes (eth0, ens1f1, ens1f0np0, …), so NCCL's and gloo's variables are set on each node.
Without them, gloo takes the address that the host's own name resolves to, often loopback (Debian: 127.0.1.1), and NCCL
takes the first interface that it finds, perhaps a container bridge.
"""

import ipaddress
import os
import re
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from mingpt.errors import UserError

BACKLOG = 2048  # connections that may be waiting to be accepted
NCCL, GLOO, NO_INFINIBAND = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE"


def address_towards(host: str) -> str:
    """This machine's address on the route to `host`, which may be this machine. Raises OSError if there is no route."""
    # Bytes: of a text that can't be a host's name, such as a..b, Python raises a UnicodeError in place of an OSError.
    family, _, _, _, address = socket.getaddrinfo(host.encode(), 9, type=socket.SOCK_DGRAM)[0]
    # A UDP socket sends nothing when it is connected: the kernel only looks the route up, and so chooses the address.
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect(address)
        return str(s.getsockname()[0])


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def bind(host: str, port: int, several: bool) -> socket.socket:
    """A socket bound to the one address that `host` resolves to on this machine. Raises OSError.

    several: other machines will connect. If `host` is a name that resolves to loopback here (Debian's 127.0.1.1,
    Kubernetes' localhost), it does not say at which address they will, so the socket is bound to all addresses.
    port: 0 lets the system choose.
    """
    address = str(socket.getaddrinfo(host.encode(), port, type=socket.SOCK_STREAM)[0][4][0])
    if not is_of_this_machine(address):
        address = address_towards(host)  # behind NAT: the router forwards to this address
    # Never more than is needed: torch's own stores listen at every address, without a password.
    everywhere = several and is_loopback(address) and host != address
    v6 = socket.has_dualstack_ipv6() if everywhere else ":" in address
    s = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET)
    try:
        # Else a restart would find the port taken for a minute, by connections of the attempt before (TIME_WAIT).
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if v6 and everywhere:
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        s.bind(("" if everywhere else address, port))
    except OSError:
        s.close()
        raise
    return s


def listen(host: str, port: int, several: bool) -> socket.socket:
    """A listening socket; parameters as for `bind`."""
    s = bind(host, port, several)
    s.listen(BACKLOG)
    return s


def is_of_this_machine(ip: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as s:
        try:
            s.bind((ip, 0))
        except OSError:
            return False
    return True


def interface_of(address: str) -> str | None:
    """The name of the interface that has this address."""
    plain = address.partition("%")[0]  # of IPv6, without its scope
    for name, addresses in psutil.net_if_addrs().items():
        for other in addresses:
            if other.address.partition("%")[0] == plain:
                return name
    return None


def limit_silence(port: int | None, seconds: float) -> None:
    """Set TCP timeouts on this process's connections to `port` (None: to any port), by keepalive and TCP_USER_TIMEOUT.

    A connection then fails once the other machine's kernel has not answered for `seconds`. A slow process on a live
    machine causes no timeout, since its kernel answers. Linux only.
    """
    # Requests to torch's stores have no limit of their own: they end when the kernel gives the connection up. If the
    # other machine loses power or network, that takes a quarter of an hour after data was sent (tcp_retries2), and for
    # ever if none was. A pulled cable had held a launcher for as long.
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    # Bounded by what the kernel accepts: 9 hours between two probes, 24 days in all.
    interval = min(max(1, int(seconds / 4)), 32767)
    limit = min(max(1, int(seconds * 1000)), 2**31 - 1)
    # torch makes these connections in C++, and gives nobody their sockets. So all of the process's are looked through.
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # not connected, or closed by another thread
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as s:  # a duplicate shares the connection's options
                if s.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if port and s.getpeername()[1] != port:
                    continue
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
                s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)


def infiniband_devices() -> list[str]:
    """The names of this node's InfiniBand cards. EFA's are among them."""
    folder = Path("/sys/class/infiniband")
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def settings(interface: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """NCCL's and gloo's variables for `interface`, without those that `environment` has already.

    Raises UserError if one of those names no interface of this node.
    """
    problems = list(filter(None, (wrong_interface(name, environment) for name in (NCCL, GLOO))))
    if problems:
        raise UserError(*problems)
    variables: dict[str, str] = {}
    if interface:
        variables = {NCCL: f"={interface}", GLOO: interface}  # without =, NCCL matches a prefix
    if not infiniband_devices():
        variables[NO_INFINIBAND] = "1"
    return {name: value for name, value in variables.items() if not environment.get(name)}


def chosen(variable: str, value: str) -> list[str]:
    """The interfaces of this node that a value of NCCL's or gloo's variable selects.

    NCCL's value is a list of prefixes, or of names after `=`; after `^`, of what not to use. gloo's is a list of names.
    """
    if variable == GLOO:
        return [name for name in psutil.net_if_addrs() if name in value.split(",")]
    mark = re.match(r"\^?=?", value)
    sign = mark[0] if mark else ""
    wanted = tuple(filter(None, value[len(sign) :].split(",")))
    selected = list[str]()
    for name in psutil.net_if_addrs():
        matches = name in wanted if "=" in sign else name.startswith(wanted)
        if matches != ("^" in sign):
            selected.append(name)
    return selected


def wrong_interface(variable: str, environment: Mapping[str, str]) -> str | None:
    """The error message if the variable selects no interface of this node; else None."""
    value = environment.get(variable, "")
    if not value or chosen(variable, value):
        return None
    names = ", ".join(psutil.net_if_addrs())
    return (
        f"{variable}={value} in the environment: this node ({socket.gethostname()}) has no such interface, only "
        f"{names}: unset it, then the one that leads to the other nodes is found"
    )
