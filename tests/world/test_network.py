"""Nodes find the interface that leads to each other, by the routing table. (Training: faults/test_silent_loss.py.)"""

import re
import socket

import pytest

from mingpt.errors import UserError
from mingpt.world import network


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
    ("value", "means_lo"), [("l", 1), ("=lo", 1), ("=l", 0), ("^=lo", 0), ("^docker", 1), ("eth9,lo", 1)]
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
