"""Nodes find the interface that leads to each other: by the routing table, and by training without being told."""

import re
import socket
from collections.abc import Iterator

import pytest

from fault_kit import LONG, launch
from mingpt.errors import UserError
from mingpt.world import network
from net_kit import Net, hosts, needs_hosts
from node_kit import Node
from run_kit import NewRun

# Their own names mean loopback, as Debian has it, and each calls its interface differently. docker0's address is
# reachable from nowhere; it is what NCCL and gloo must not take.
ADDRESSES = {"a": "10.98.0.11", "b": "10.98.0.12"}
INTERFACES = {"a": "ens1f1", "b": "ens1f0np0"}


@pytest.fixture
def net() -> Iterator[Net]:
    with hosts(ADDRESSES, interfaces=INTERFACES, own=dict.fromkeys(ADDRESSES, "127.0.1.1")) as net:
        for host in ADDRESSES:
            net.run(host, ["ip", "link", "add", "docker0", "type", "bridge"])
            net.run(host, ["ip", "addr", "add", "172.17.0.1/16", "dev", "docker0"])
            net.run(host, ["ip", "link", "set", "docker0", "up"])
        yield net


def test_the_way_to_a_host_and_its_interface() -> None:
    assert network.address_towards("127.0.0.1") == "127.0.0.1"
    assert network.interface_of("127.0.0.1") == "lo"
    assert network.interface_of("192.0.2.1") is None
    assert [network.is_loopback(a) for a in ("127.0.1.1", "::1", "10.98.0.11", "fe80::1%eth0")] == [1, 1, 0, 0]
    with pytest.raises(socket.gaierror):
        network.address_towards("no-such-host.invalid")


@pytest.mark.parametrize(("seconds", "limit", "ask"), [(0.0001, 1, 1), (1e9, 2**31 - 1, 32767)])
def test_any_number_of_seconds_is_a_limit_of_silence(seconds: float, limit: int, ask: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as s:
        network.limit_silence(server.getsockname()[1], seconds)
        options = (socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
        assert [s.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [limit, ask, ask]
        assert s.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_what_nccl_and_gloo_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "infiniband_devices", list)
    told = {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    assert network.settings("lo", {}) == told
    assert network.settings(None, {}) == {"NCCL_IB_DISABLE": "1"}
    assert network.settings("lo", {"NCCL_SOCKET_IFNAME": "l", "NCCL_IB_DISABLE": "0"}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert network.settings("lo", {"NCCL_SOCKET_IFNAME": ""}) == told
    monkeypatch.setattr(network, "infiniband_devices", lambda: ["mlx5_0"])
    assert network.settings("lo", {"GLOO_SOCKET_IFNAME": "lo"}) == {"NCCL_SOCKET_IFNAME": "=lo"}


@pytest.mark.parametrize(
    ("value", "means_lo"), [("lo", 1), ("l", 1), ("=lo", 1), ("=l", 0), ("^=lo", 0), ("^docker", 1), ("eth9,lo", 1)]
)
def test_nccl_takes_prefixes_and_exclusions(value: str, means_lo: int) -> None:
    assert ("lo" in network.chosen(network.NCCL, value)) == means_lo


def test_an_interface_that_is_not_there() -> None:
    with pytest.raises(UserError) as caught:
        network.settings("lo", {"NCCL_SOCKET_IFNAME": "=l", "GLOO_SOCKET_IFNAME": "ib9"})
    settings = ("NCCL_SOCKET_IFNAME==l", "GLOO_SOCKET_IFNAME=ib9")
    for problem, setting in zip(caught.value.problems, settings, strict=True):
        assert problem.startswith(f"{setting} in the environment: ")
        assert {name for _, name in socket.if_nameindex()} <= set(re.split("[, :]+", problem))


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", pytest.param("c10d", marks=pytest.mark.nightly)])
def test_hosts_whose_names_mean_loopback_train_together(
    backend: str, net: Net, new_run: NewRun, undisturbed: NewRun
) -> None:
    """Nothing in the commands names an interface, or the node's own address."""
    run, nodes = new_run(), []
    for rank, host in enumerate(ADDRESSES):
        place = [f"--rdzv-backend={backend}", "--rdzv-endpoint=a:29500", f"--node-rank={rank}", "--rdzv-id=test"]
        options = ("--nnodes=2", "--nproc-per-node=2", *place)
        nodes.append(Node([*net.enter(host), *launch(run, options=options)]))
    try:
        codes = [node.wait() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert codes == [0, 0], nodes[0].output + nodes[1].output
    assert run.digest() == undisturbed(*LONG).digest()
