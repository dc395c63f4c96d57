"""Which network NCCL takes: read from lines that others' machines have printed, and told for each of two hosts.

There is no GPU here, so NCCL is the stand-in: a library that torch calls, and its log.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mingpt.preflight.meeting import NETWORK
from tests.kits.net_kit import LIMIT, Net, hosts, needs_hosts
from tests.kits.told import Told

# Of public logs, with NCCL_DEBUG=INFO; the lines before and after them say nothing about networks.
DGX = "dgxh100-4:460770:460842 [0] NCCL INFO"
ROCE = f"""{DGX} Bootstrap : Using enp220s0np0:11.1.128.136<0>
{DGX} NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB enp220s0np0:11.1.128.136<0>
{DGX} Using non-device net plugin version 0
{DGX} Using network IB"""  # 2.19.3, github.com/NVIDIA/nccl-tests/issues/185
NO_VERBS = """GENOA-06:4766:4780 [0] NCCL INFO Failed to open libibverbs.so[.1]
GENOA-06:4766:4780 [0] NCCL INFO NET/Socket : Using [0]enp227s0f0:192.168.1.250<0>
GENOA-06:4766:4780 [0] NCCL INFO PROFILER/Plugin: Could not find: libnccl-profiler.so.
GENOA-06:4766:4780 [0] NCCL INFO Using network Socket"""  # 2.25.1
NO_DEVICE = """llama-3-8b-node-0-0:152:386 [0] NCCL INFO NET/IB : No device found.
llama-3-8b-node-0-0:152:386 [0] NCCL INFO NET/IB : Using [RO]; OOB eth0:10.0.4.51<0>
llama-3-8b-node-0-0:152:386 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to ^docker0,lo
llama-3-8b-node-0-0:152:386 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.4.51<0>
llama-3-8b-node-0-0:152:386 [0] NCCL INFO Initialized NET plugin Socket
llama-3-8b-node-0-0:152:386 [0] NCCL INFO Assigned NET plugin Socket to comm
llama-3-8b-node-0-0:152:386 [0] NCCL INFO Using network Socket"""  # 2.27
EFA = """8h200-3:6310:6318 [0] NCCL INFO NET/OFI Selected Provider is efa (found 16 nics)
8h200-3:6310:6318 [0] NCCL INFO NET/OFI NIC group 0 device #0 0000:56:00.0
8h200-3:6310:6318 [0] NCCL INFO NET/OFI Creating one domain per process
8h200-3:6310:6318 [0] NCCL INFO Using network Libfabric"""  # github.com/NVIDIA/nccl/issues/1597


@pytest.mark.parametrize(
    ("log", "lines"),
    [
        (
            ROCE,
            [
                "NET/IB : Using [0]mlx5_10:1/RoCE [1]mlx5_11:1/RoCE [RO]; OOB enp220s0np0:11.1.128.136<0>",
                "Using network IB",
            ],
        ),
        (
            NO_VERBS,
            [
                "Failed to open libibverbs.so[.1]",
                "NET/Socket : Using [0]enp227s0f0:192.168.1.250<0>",
                "Using network Socket",
            ],
        ),
        (NO_DEVICE, ["NET/Socket : Using [0]eth0:10.0.4.51<0>", "Using network Socket"]),
        (EFA, ["NET/OFI Selected Provider is efa (found 16 nics)", "Using network Libfabric"]),
    ],
)
def test_what_nccl_says_of_networks(log: str, lines: list[str]) -> None:
    assert NETWORK.findall(log) == lines


# In place of CUDA and NCCL, in the helpers: gloo carries the bytes, and LOG is what NCCL writes.
STAND_IN = """
import os, sys
if "--multiprocessing-fork" in sys.orig_argv:
    import torch, torch.distributed as dist
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_name = lambda index: "NVIDIA H100"
    torch.cuda.nccl.version = lambda: (2, 29, 7)
    zeros, new_group = torch.zeros, dist.new_group
    torch.zeros = lambda *sizes, device="cpu": zeros(min(*sizes, 99), device="cpu")
    def group(backend):
        assert (backend, os.environ["NCCL_DEBUG"]) == ("nccl", "INFO")
        if not os.environ["LOG"]:
            raise RuntimeError("NCCL error: unhandled system error\\nLast error: none")
        with open(os.environ["NCCL_DEBUG_FILE"], "w") as file:
            file.write(os.environ["LOG"])
        return new_group(backend="gloo")
    dist.new_group = group
"""


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    with hosts({"a": "10.98.0.11", "b": "10.98.0.12"}, interfaces={"a": "eth0", "b": "eth0"}) as made:
        yield made


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_each_hosts_network_is_told(broken: bool, net: Net, tmp_path: Path, told: Told) -> None:
    """Host b has a device that NCCL does not take; or NCCL fails there."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    net.run("b", ["sh", "-c", "mount -t tmpfs tmpfs /sys/class; mkdir -p /sys/class/infiniband/mlx5_0"])
    command = [sys.executable, "-m", "mingpt.preflight", "--nnodes=2", "--rdzv-endpoint=a:29500", "--seconds=60"]
    logs, env = {"a": ROCE, "b": "" if broken else NO_VERBS}, {"PYTHONPATH": str(tmp_path)}
    started = {
        host: net.popen(host, [*command, f"run.dir={tmp_path}/run"], env={**env, "LOG": log})
        for host, log in logs.items()
    }
    outputs = {host: process.communicate(timeout=LIMIT)[0] for host, process in started.items()}
    assert [process.returncode for process in started.values()] == [0, 0], outputs
    lines = [line for output in outputs.values() for line in output.splitlines() if "NCCL" in line]
    told([line for line in lines if "sets" not in line], *(word for line in lines for word in speeds(line)))


def speeds(line: str) -> list[str]:
    return [line.split()[3]] if " GB/s " in line else []
