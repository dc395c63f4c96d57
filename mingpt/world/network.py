"""Which network interface leads to another node: the kernel's routing table knows, and nobody has to be asked.

Each node may call its own differently (eth0, ens1f1, ens1f0np0, …), so NCCL and gloo are told on each node anew. Left
alone, gloo takes the address of the host's own name, which often means loopback (Debian: 127.0.1.1), and NCCL the first
interface that it finds, which may be a container bridge's.
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

BACKLOG = 2048  # nodes and processes that may knock at the same moment
NCCL, GLOO, NO_INFINIBAND = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE"


def address_towards(host: str) -> str:
    """This machine's address on the way to a host, of this machine or another. Raises OSError if there is no way."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.connect(address)  # sends nothing
        return str(s.getsockname()[0])


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def bind(host: str, port: int, several: bool) -> socket.socket:
    """A socket at the address that `host` means on this machine, and at no other, to be listened on. Raises OSError.

    several: nodes on other machines come here. A name that means loopback here (Debian's 127.0.1.1, Kubernetes'
    localhost) does not tell where they come to: then it is one of every address. Port 0: the system chooses.
    """
    address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    if not is_of_this_machine(address):
        address = address_towards(host)  # behind NAT: the router hands on to this one
    everywhere = several and is_loopback(address) and host != address
    v6 = socket.has_dualstack_ipv6() if everywhere else ":" in address
    s = socket.socket(socket.AF_INET6 if v6 else socket.AF_INET)
    try:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if v6 and everywhere:
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        s.bind(("" if everywhere else address, port))
    except OSError:
        s.close()
        raise
    return s


def listen(host: str, port: int, several: bool) -> socket.socket:
    """As `bind`, and it listens."""
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
    """The interface that has this address."""
    plain = address.partition("%")[0]  # of IPv6, without its scope
    found = psutil.net_if_addrs().items()
    return next((name for name, all_of_it in found if plain in {a.address.partition("%")[0] for a in all_of_it}), None)


def limit_silence(port: int | None, seconds: float) -> None:
    """Have this process's connections to a port (None: to any) fail once the other side has not answered for so long.

    For torch's stores: what waits for an answer there waits without a limit of its own, for as long as the kernel
    believes in the connection. When a machine vanishes without a word (a cable, a power supply), that is a quarter of
    an hour where something was sent (tcp_retries2), and for ever where nothing was. And for groups of processes that
    may wait long for each other: a slow one is alive, and its kernel answers. Linux only.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    # What the kernel takes at most: 9 hours between two questions, 24 days in all.
    ask, limit = min(max(1, int(seconds / 4)), 32767), min(max(1, int(seconds * 1000)), 2**31 - 1)
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as s:  # the options are of the connection, not of this name
                if s.family not in (socket.AF_INET, socket.AF_INET6) or s.getpeername()[1] != (
                    port or s.getpeername()[1]
                ):
                    continue
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
                s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ask)
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ask)


def infiniband_devices() -> list[str]:
    folder = Path("/sys/class/infiniband")
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def settings(interface: str | None, environment: Mapping[str, str]) -> dict[str, str]:
    """What NCCL and gloo are told on this node: each where the user has said nothing.

    Raises UserError if what the user has said means no interface of this node.
    """
    problems = [problem for name in (NCCL, GLOO) if (problem := wrong_interface(name, environment))]
    if problems:
        raise UserError(*problems)
    told: dict[str, str] = {}
    if interface:
        told = {NCCL: f"={interface}", GLOO: interface}  # without =, NCCL takes all that begin so
    if not infiniband_devices():
        told[NO_INFINIBAND] = "1"
    return {name: value for name, value in told.items() if not environment.get(name)}


def chosen(variable: str, value: str) -> list[str]:
    """The interfaces of this node that a value of one of the two variables means; NCCL's are prefixes, ^ all others."""
    there = list(psutil.net_if_addrs())
    if variable == GLOO:
        wanted = value.split(",")
        return [name for name in there if name in wanted]
    mark = re.match(r"\^?=?", value)
    sign = mark[0] if mark else ""
    wanted = [name for name in value[len(sign) :].split(",") if name]
    hit = [n for n in there if n in wanted or ("=" not in sign and any(n.startswith(w) for w in wanted))]
    return [n for n in there if n not in hit] if "^" in sign else hit


def wrong_interface(variable: str, environment: Mapping[str, str]) -> str | None:
    """What to say of a variable that names no interface of this node."""
    value = environment.get(variable, "")
    if not value or chosen(variable, value):
        return None
    there = ", ".join(psutil.net_if_addrs())
    return (
        f"{variable}={value} in the environment: this node ({socket.gethostname()}) has no such interface, only "
        f"{there}: unset it, then the one that leads to the other nodes is found"
    )
