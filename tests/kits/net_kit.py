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
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

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

needs_hosts = pytest.mark.skipif(
    subprocess.run(
        ["unshare", *NAMESPACES, "ip", "link", "add", "one", "type", "veth", "peer", "other"], capture_output=True
    ).returncode
    != 0,
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
    keepers: dict[str, _Keeper] = field(default_factory=dict)
    bridge: _Keeper | None = None

    def enter(self, host: str) -> list[str]:
        """What stands before a command that is to run on a host, in this process's folder.

        The process is nsenter, and the command its child: to signal that, use `signal`.
        """
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

    def run(
        self, host: str, command: Sequence[str], env: Mapping[str, str] | None = None, limit: float = LIMIT
    ) -> "subprocess.CompletedProcess[str]":
        """A command's end. Fails the test, after killing it, if the limit passes."""
        process = self.popen(host, command, env)
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.signal(process, signal.SIGKILL)
            raise AssertionError(f"{host}: {command} still running after {limit} s: {process.communicate()}") from None
        return subprocess.CompletedProcess(command, process.returncode, output)

    def signal(self, process: "subprocess.Popen[Any]", number: signal.Signals) -> None:
        """To a command started through `enter`: nsenter hands no signal on."""
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(child), number)

    def hosts_file(self, host: str) -> Path:
        """Its /etc/hosts; what is written there holds at once."""
        return self.folder / f"{host}.hosts"

    # --- faults ---

    def cut(self, host: str) -> None:
        """Pull the cable."""
        self._on_bridge("link", "set", self._port(host), "down")

    def mend(self, host: str) -> None:
        """Put it back, and wait until packets pass: the kernel takes up to a second to believe it."""
        self._on_bridge("link", "set", self._port(host), "up")
        interface, deadline = self.interfaces[host], time.monotonic() + LIMIT
        while self.run(host, ["cat", f"/sys/class/net/{interface}/operstate"]).stdout != "up\n":
            assert time.monotonic() < deadline, f"{host}: {interface} does not come up"
            time.sleep(0.05)
        for name in self.keepers:  # or they would remember for a while that the others did not answer
            self._ip(name, "neighbour", "flush", "dev", self.interfaces[name])

    def close_port(self, host: str, port: int | str) -> None:
        """A firewall before this TCP port (or a range of them, "1024-65534") of a host: what comes for it is lost."""
        rules = self.run(host, ["ip", "rule"]).stdout
        # A routing rule sees where a packet wants to go. It must come before the rule that says "for this host".
        if "\n0:" in f"\n{rules}":
            self._ip(host, "rule", "add", "pref", "100", "lookup", "local")
            self._ip(host, "rule", "del", "pref", "0")
        selector = ["iif", self.interfaces[host], "ipproto", "tcp", "dport", str(port)]
        self._ip(host, "rule", "add", "pref", "50", *selector, "blackhole")

    def swallow(self, host: str, mtu: int = 600) -> None:
        """An MTU black hole: packets above `mtu` bytes, to and from this host, are lost, and nobody is told."""
        self._on_bridge("link", "set", self._port(host), "mtu", str(mtu))
        for name in self.keepers:  # a veth carries the kernel's bundles of segments whatever their size: don't bundle
            self._ip(name, "link", "set", self.interfaces[name], "gso_max_segs", "1")

    def small_disk(self, host: str, folder: Path, size: str) -> None:
        """A disk of this size (as tmpfs takes it: 10m) at a folder, which only this host sees."""
        folder.mkdir(parents=True, exist_ok=True)
        self._do(host, "mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", str(folder))

    # --- how it is made ---

    def _add(self, host: str, own: str) -> None:
        names = [f"{address} {name}" for name, address in self.addresses.items() if name != host]
        self.hosts_file(host).write_text("\n".join(["127.0.0.1 localhost", f"{own} {host}", *names, ""]))
        files = str(self.hosts_file(host)), str(self.folder / "resolv.conf")
        self.keepers[host] = _Keeper("unshare", *NAMESPACES, "sh", "-c", SET_UP, "sh", host, *files)
        assert self.bridge
        ends = (self.keepers[host].pid, self.interfaces[host]), (self.bridge.pid, self._port(host))
        one, other = (["name", name, "netns", str(pid)] for pid, name in ends)
        _check(["ip", "link", "add", *one, "type", "veth", "peer", *other])
        self._plug(host)

    def _plug(self, host: str) -> None:
        self._on_bridge("link", "set", self._port(host), "master", "bridge", "up")
        self._ip(host, "addr", "add", f"{self.addresses[host]}/24", "dev", self.interfaces[host])
        self._ip(host, "link", "set", self.interfaces[host], "up")

    def _port(self, host: str) -> str:
        return f"port{list(self.addresses).index(host)}"

    def _do(self, host: str, *command: str) -> None:
        _check([*self.enter(host), *command])

    def _ip(self, host: str, *arguments: str) -> None:
        self._do(host, "ip", *arguments)

    def _on_bridge(self, *arguments: str) -> None:
        assert self.bridge
        _check(["nsenter", f"--target={self.bridge.pid}", "--net", "ip", *arguments])

    def close(self) -> None:
        for keeper in [*self.keepers.values(), *([self.bridge] if self.bridge else [])]:
            keeper.end()


def _check(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, f"{command}: {done.stderr}"


@contextmanager
def hosts(
    addresses: Mapping[str, str],
    *,
    names: Mapping[str, str] | None = None,
    interfaces: Mapping[str, str] | None = None,
    own: Mapping[str, str] | None = None,
) -> Iterator[Net]:
    """Hosts by their names, which all of them know, with addresses of one /24 network.

    names: more of them, with their addresses, as a DNS would know. interfaces: what a host calls its own, if not eth0.
    own: the address that a host knows for its own name, if not the true one; Debian writes 127.0.1.1 there.
    """
    with TemporaryDirectory(prefix="mingpt-hosts-") as folder:
        net = Net(addresses, {h: (interfaces or {}).get(h, "eth0") for h in addresses}, Path(folder))
        # An unreachable resolver would be waited for, 10 s a look-up; here nobody listens, which is told at once.
        (net.folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        try:
            net.bridge = _Keeper("unshare", "--net", "--fork", "--kill-child", "sh", "-c", f"echo ready; {KEEPER}")
            net._on_bridge("link", "add", "bridge", "type", "bridge")
            net._on_bridge("link", "set", "bridge", "up")
            for host, address in addresses.items():
                net._add(host, (own or {}).get(host, address))
                with net.hosts_file(host).open("a") as f:
                    f.writelines(f"{address} {name}\n" for name, address in (names or {}).items())
            yield net
        finally:
            net.close()
