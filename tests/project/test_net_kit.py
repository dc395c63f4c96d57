"""The hosts that other tests run on are what they say: separate, joined, and each fault is real."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from net_kit import Net, hosts, needs_hosts
from paths_kit import KITS

pytestmark = [needs_hosts, pytest.mark.slow, pytest.mark.nightly]

# Says how far a conversation with the server at 10.98.0.11 gets, and how many tenths of a second that takes.
# Only what is named must be answered within a second.
CLIENT = """
import socket, sys, time
limit = lambda what: 1 if what in sys.argv else 60
begun = time.monotonic()
reached = "nothing"
try:
    with socket.create_connection(("10.98.0.11", 29500), timeout=limit("connected")) as s:
        reached = "connected"
        for size, name in (1, "small"), (50_000, "large"):
            s.settimeout(limit(name))
            s.sendall(b"x" * size)
            answer = 0
            while answer < size:
                answer += len(s.recv(65536))
            reached = name
except OSError:
    pass
print(reached, round((time.monotonic() - begun) * 10))
"""
SERVER = """
import socket
listener = socket.create_server(("", 29500))
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    while data := connection.recv(65536):
        connection.sendall(data)
"""


@pytest.fixture
def net() -> Iterator[Net]:
    with hosts({"a": "10.98.0.11", "b": "10.98.0.12"}, interfaces={"b": "ens1f1"}, own={"a": "127.0.1.1"}) as net:
        yield net


@pytest.fixture
def server(net: Net) -> "subprocess.Popen[str]":
    process = net.popen("a", [sys.executable, "-c", SERVER])
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def reach(net: Net, *soon: str) -> str:
    """How far a client on b gets."""
    return net.run("b", [sys.executable, "-c", CLIENT, *soon]).stdout.split()[0]


def test_each_host_has_its_own_name_network_and_processes(net: Net) -> None:
    script = "hostname; pwd; ls /sys/class/net; getent hosts a b; ls -d /proc/[0-9]* | wc -l"
    names, cwd, *rest = net.run("b", ["sh", "-c", script]).stdout.split("\n", 2)
    assert (names, cwd) == ("b", str(Path.cwd()))
    assert rest[0].split()[:6] == ["ens1f1", "lo", "10.98.0.11", "a", "10.98.0.12", "b"]
    assert int(rest[0].split()[-1]) < 10
    assert net.run("a", ["getent", "hosts", "a"]).stdout.split() == ["127.0.1.1", "a"]


def test_faults_are_real_and_end(net: Net, server: object) -> None:
    assert net.run("b", ["ip", "route", "get", "192.0.2.1"]).stdout == "RTNETLINK answers: Network is unreachable\n"
    assert reach(net) == "large"
    net.cut("a")
    assert reach(net, "connected") == "nothing"
    net.mend("a")
    assert reach(net) == "large"
    net.close_port("a", "29000-29999")
    assert reach(net, "connected") == "nothing"
    assert net.run("a", [sys.executable, "-c", CLIENT]).stdout.split()[0] == "large"  # the host itself passes


def test_a_black_hole_and_a_small_disk(net: Net, server: object, tmp_path: Path) -> None:
    net.swallow("b")
    assert reach(net, "large") == "small"
    net.small_disk("b", tmp_path, "64k")
    filled = net.run("b", ["dd", "if=/dev/zero", f"of={tmp_path}/file", "bs=128k", "count=1"])
    assert "No space left on device" in filled.stdout
    assert list(tmp_path.iterdir()) == []  # nobody else sees it


def test_nothing_is_left_when_the_test_process_is_killed(tmp_path: Path) -> None:
    script = f"""
import sys, time
sys.path.insert(0, {str(KITS)!r})
from net_kit import hosts
with hosts({{"a": "10.98.0.11"}}) as net:
    net.popen("a", ["sh", "-c", "echo $$ >{tmp_path}/started; sleep 1000 {tmp_path}"])
    print(net.keepers["a"].pid, flush=True)
    time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        keeper = int(process.stdout.readline())
        process.kill()
    deadline = time.monotonic() + 300
    while Path(f"/proc/{keeper}/root").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{keeper}/root").exists()  # a dead one that nobody has reaped yet has none
