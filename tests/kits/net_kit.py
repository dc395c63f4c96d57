"""Several hosts on one machine, each with an address, a host name, an /etc/hosts and an interface of its own.

A host is a network, uts, mount and pid namespace. A bridge joins them in a network namespace of its own, from which no
route leads out. Nothing has a name outside of these namespaces, so test processes can't get in each other's way; and
each namespace lives as long as a process that waits for the end of a pipe from this one, so nothing is ever left.

    with hosts({"a": "10.98.0.11", "b": "10.98.0.12"}, interfaces={"b": "ens1f1"}) as net:
        head = Node([*net.enter("a"), sys.executable, …])  # node_kit's; or net.popen("a", […]), net.run("a", […])
        net.cut("b")

Files are shared, but for /etc/hosts, /etc/resolv.conf, /dev/shm and what `net.small_disk` makes. Faults are real ones,
with what every Linux has (no netem, no iptables).
"""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.kits.node_kit import wait_until

LIMIT = 300  # seconds for `run`
KEEPER = "cat >/dev/null"  # ends when the test process closes its pipe, or dies
NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
# What becomes of a new host before anything runs on it: sysfs shows this network's interfaces only when mounted here.
SET_UP = f"""set -e
hostname "$1"
mount -t sysfs sysfs /sys
mount --bind "$2" /etc/hosts
mount --bind "$3" /etc/resolv.conf
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
ip link set lo up
echo ready
{KEEPER}"""

CAN_BE_MADE = ["unshare", *NAMESPACES, "ip", "link", "add", "one", "type", "veth", "peer", "other"]
needs_hosts = pytest.mark.skipif(
    subprocess.run(CAN_BE_MADE, capture_output=True).returncode != 0,
    reason="needs root, iproute2 and network namespaces: hosts are made out of those",
)


class _Keeper:
    """The process that a namespace lives with."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout
        assert self.process.stdout.readline() == b"ready\n", command
        # What unshare has forked: the one that is inside.
        self.pid = int(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text())

    def end(self) -> None:
        """With everything that runs inside: it is process 1 there."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait(LIMIT)
        self.process.stdout.close()


@dataclass
class Net:
    """The hosts by name. All that is done to one is undone by its end."""

    addresses: Mapping[str, str]
    interfaces: Mapping[str, str]
    folder: Path
    keepers: dict[str, _Keeper] = field(default_factory=dict)  # of the hosts, and of the bridge

    @property
    def bridge(self) -> _Keeper:
        return self.keepers["bridge"]

    def enter(self, host: str) -> list[str]:
        """What stands before a command that is to run on a host, in this process's folder."""
        inside = ["nsenter", f"--target={self.keepers[host].pid}", "--net", "--uts", "--mount", "--pid"]
        return [*inside, f"--wdns={os.getcwd()}", "--"]

    def popen(self, host: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
        """Start a command, with `env` added to this process's; stdout and stderr come together."""
        return subprocess.Popen(
            [*self.enter(host), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {})},
        )

    def run(self, host: str, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """A command to its end."""
        process = self.popen(host, command)
        output, _ = process.communicate(timeout=LIMIT)
        return subprocess.CompletedProcess(command, process.returncode, output)

    def hosts_file(self, host: str) -> Path:
        """Its /etc/hosts; what is written there holds at once."""
        return self.folder / f"{host}.hosts"

    # --- faults ---

    def cut(self, host: str) -> None:
        """Pull the cable."""
        self._do("bridge", f"ip link set {self._port(host)} down")

    def mend(self, host: str) -> None:
        """Put it back, and wait until packets pass: the kernel takes up to a second to believe it."""
        self._do("bridge", f"ip link set {self._port(host)} up")
        state = ["cat", f"/sys/class/net/{self.interfaces[host]}/operstate"]
        wait_until(lambda: self.run(host, state).stdout == "up\n", f"{host} is connected", LIMIT)
        for name, interface in self.interfaces.items():  # or they would remember for a while that it did not answer
            self._do(name, f"ip neighbour flush dev {interface}")

    def close_port(self, host: str, port: int | str) -> None:
        """A firewall before this TCP port (or a range of them, "1024-65534") of a host: what comes for it is lost."""
        # A routing rule sees where a packet wants to go. It must come before the rule that says "for this host".
        local = "ip rule | grep -q ^0: && ip rule add pref 100 lookup local && ip rule del pref 0"
        closed = f"ip rule add pref 50 iif {self.interfaces[host]} ipproto tcp dport {port} blackhole"
        self._do(host, f"{local}; {closed}")

    def swallow(self, host: str, mtu: int = 600) -> None:
        """An MTU black hole: packets above `mtu` bytes, to and from this host, are lost, and nobody is told."""
        self._do("bridge", f"ip link set {self._port(host)} mtu {mtu}")
        for name, interface in self.interfaces.items():
            # A veth carries the kernel's bundles of segments whatever their size: don't bundle.
            self._do(name, f"ip link set {interface} gso_max_segs 1")

    def small_disk(self, host: str, folder: Path, size: str) -> None:
        """A disk of this size (as tmpfs takes it: 10m) at a folder, which only this host sees."""
        self._do(host, f"mkdir -p {folder}; mount -t tmpfs -o size={size},mode=1777 tmpfs {folder}")

    # --- how it is made ---

    def add(self, host: str, names: Mapping[str, str]) -> None:
        """Something with namespaces of its own, and these names with their addresses in /etc/hosts."""
        self.hosts_file(host).write_text("".join(f"{address} {name}\n" for name, address in names.items()))
        files = str(self.hosts_file(host)), str(self.folder / "resolv.conf")
        self.keepers[host] = _Keeper("unshare", *NAMESPACES, "sh", "-c", SET_UP, "sh", host, *files)

    def plug(self, host: str) -> None:
        """Into the bridge."""
        port, interface = self._port(host), self.interfaces[host]
        ends = f"name {interface} netns {self.keepers[host].pid}", f"name {port} netns {self.bridge.pid}"
        subprocess.run(f"ip link add {ends[0]} type veth peer {ends[1]}".split(), check=True, timeout=LIMIT)
        self._do("bridge", f"ip link set {port} master bridge up")
        self._do(host, f"ip addr add {self.addresses[host]}/24 dev {interface}; ip link set {interface} up")

    def _port(self, host: str) -> str:
        return f"port{list(self.addresses).index(host)}"

    def _do(self, host: str, script: str) -> None:
        subprocess.run([*self.enter(host), "sh", "-c", script], check=True, timeout=LIMIT)


@contextmanager
def hosts(
    addresses: Mapping[str, str],
    *,
    names: Mapping[str, str] = {},
    interfaces: Mapping[str, str] = {},
    own: Mapping[str, str] = {},
) -> Iterator[Net]:
    """Hosts by their names, which all of them know, with addresses of one /24 network.

    names: more of them, with their addresses, as a DNS would know. interfaces: what a host calls its own, if not eth0.
    own: the address that a host knows for its own name, if not the true one; Debian writes 127.0.1.1 there.
    """
    with TemporaryDirectory(prefix="mingpt-hosts-") as folder:
        net = Net(addresses, dict.fromkeys(addresses, "eth0") | dict(interfaces), Path(folder))
        # An unreachable resolver would be waited for, 10 s a look-up; here nobody listens, which is told at once.
        (net.folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        try:
            net.add("bridge", {})
            net._do("bridge", "ip link add bridge type bridge; ip link set bridge up")
            for host, address in addresses.items():
                net.add(host, {"localhost": "127.0.0.1", **addresses, host: own.get(host, address), **names})
                net.plug(host)
            yield net
        finally:
            for keeper in net.keepers.values():
                keeper.end()
