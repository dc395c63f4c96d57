"""Two hosts, good or broken in one way: preflight names what is wrong, where, and what to do, and always ends.

Which network NCCL takes is read from lines that others' machines have printed, and told for each of two hosts.
"""

import json
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

import mingpt
from mingpt.cli import cli
from mingpt.errors import UserError
from mingpt.preflight import compare, messages
from mingpt.preflight.finding import Finding, exit_code, findings_of
from mingpt.preflight.helper import Unreached
from mingpt.preflight.machine import source_sha256
from mingpt.preflight.meeting import NETWORK
from mingpt.snapshot.elsewhere import Marker
from tests.kits.net_kit import LIMIT, Net, hosts, needs_hosts
from tests.kits.report_kit import Made
from tests.kits.store_kit import HIDDEN, Stores
from tests.kits.told import Told


def shown(output: str) -> list[str]:
    return [str(Finding(**finding)) for finding in json.loads(output)["findings"]]


class Nodes:
    """Host a is the head; both are given its name, and nothing else."""

    def __init__(self, net: Net, folder: Path) -> None:
        self.net, self.folder, self.run_dir = net, folder, folder / "run"
        self.on: Sequence[str] = ("a", "b")

    def check(self, *options: str, env: Mapping[str, Mapping[str, str]] = {}) -> dict[str, tuple[int, str]]:
        """The exit code and the output of preflight on each host. env: of each, what it has more."""
        common = ["--nnodes=2", "--rdzv-endpoint=a:29500", f"run.dir={self.run_dir}", *options]
        command = [sys.executable, "-m", "mingpt.preflight", *common]
        started = {host: self.net.popen(host, command, env.get(host)) for host in self.on}
        outputs = {host: process.communicate(timeout=LIMIT)[0] for host, process in started.items()}
        return {host: (process.returncode, outputs[host]) for host, process in started.items()}

    # --- faults ---

    def head_means(self, name: str) -> None:
        file = self.net.hosts_file("b")
        file.write_text(file.read_text().replace("10.98.0.11 a", name))

    def own_disks(self, holder: str = "") -> None:
        """That of b is too small for the snapshots. holder: the host that has the run."""
        self.net.small_disk("b", self.run_dir, "20m")
        Made(self.folder / "held").claim(1, 0)
        if holder:
            assert self.net.run(holder, ["cp", "-r", f"{self.folder}/held/.", str(self.run_dir)]).returncode == 0

    def missing(self) -> None:
        self.own_disks()
        Marker("a" * 32, "c", 2, 1200).write(str(self.run_dir))

    def no_power(self) -> None:
        self.net.cut("a")
        self.on = ("b",)


FAULTS: dict[str, Callable[[Nodes], object]] = {
    "none": lambda n: None,
    "the run is on b's disk": lambda n: n.own_disks("b"),
}
MORE: dict[str, Callable[[Nodes], object]] = {  # nightly
    "disks of their own": Nodes.own_disks,
    "the run is on a machine that is missing": Nodes.missing,
    "the head's port is closed": lambda n: n.net.close_port("a", 29500),
    "large packets are lost": lambda n: n.net.swallow("b"),
    "other ports are closed": lambda n: n.net.close_port("a", "29501-65534"),
    "the head's name means loopback": lambda n: n.head_means("127.0.1.1 a"),
    "a head without power": Nodes.no_power,
}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    addresses = {"a": "10.98.0.11", "b": "10.98.0.12"}
    with hosts(addresses, interfaces={"a": "ens1f1", "b": "ens1f0np0"}, own={"a": "127.0.1.1"}) as net:
        yield Nodes(net, tmp_path)


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("fault", [*FAULTS, *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE)])
def test_each_fault_is_told_on_each_host(fault: str, nodes: Nodes, told: Told) -> None:
    (FAULTS | MORE)[fault](nodes)
    done = nodes.check("--seconds=20", "--json")
    text = "".join(
        f"{h}, exit code {code}:\n"
        + "\n".join([*(n for n in json.loads(out)["notes"] if "disk" in n), *shown(out), ""])
        for h, (code, out) in done.items()
    )
    told(re.sub(r"only .*?:|2\.\S+ on a:", "…:", text), nodes.run_dir)  # interfaces, a version
    if fault == "none":
        a, b = (n["environment"] for n in json.loads(done["a"][1])["nodes"])
        assert (a["NCCL_SOCKET_IFNAME"], b["GLOO_SOCKET_IFNAME"]) == ("=ens1f1", "ens1f0np0")
        assert list(nodes.run_dir.iterdir()) == []
        bind = "from mingpt.world.network import listen; listen('a', 29500, True)"
        assert nodes.net.run("a", [sys.executable, "-c", bind]).returncode == 0  # training may take the port at once


# --- one machine ---


def check(folder: object, *options: str) -> int:
    return cli.run("preflight", ["--json", "--seconds=30", f"run.dir={folder}", *options])


def test_one_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, "train.threads=1000") == 0
    report = json.loads(output := capsys.readouterr().out)
    facts = report["nodes"][0]["facts"]
    [finding] = [f for f in shown(output) if "(cpu)" in f]
    assert finding.startswith(f"warning on {facts['host']} ")
    assert "train.threads=1000" in finding
    assert facts["project"] == f"{mingpt.__version__} {source_sha256()[:8]}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_bucket_is_tried(serve: Stores, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(f"{serve('proxied').url}/x") == 0
    output = capsys.readouterr().out
    assert output.count("conditional put") == 1
    assert HIDDEN not in output


@pytest.mark.parametrize(
    ("shape", "answers"),
    [
        (messages.MET, [None, ["a", "b"]]),
        (messages.NODES, [{}]),
        (messages.FINDINGS, [[], [{"level": "fine"}]]),
    ],
)
def test_answers_of_another_shape_are_none(shape: TypeAdapter[list[Any]], answers: object) -> None:
    with pytest.raises(Unreached):
        messages.read(shape, answers, 2)


@pytest.mark.parametrize("slurm", [True, False])
def test_what_the_head_finds_alone(
    slurm: bool, tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under Slurm it has no loopback address; elsewhere its port is taken."""
    if slurm:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert check(tmp_path, "--nnodes=2", "--node-rank=0", f"--rdzv-endpoint=127.0.0.1:{port}") == 64
    told([f for f in shown(capsys.readouterr().out) if "problem" in f], port, socket.gethostname())


@pytest.mark.parametrize("argument", ["train.max_step=3", "--seconds=nan", "--seconds=-1"])
def test_a_mistake_is_told_first(argument: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], told: Told) -> None:
    assert check(tmp_path, argument) == 64
    told(capsys.readouterr().err)


def test_what_differs_between_nodes(told: Told) -> None:
    """The most common version is right; the head decides a tie."""
    same = dict.fromkeys(("torch", "nccl", "project", "python", "driver", "gpus", "capability"), "1")
    older, other = {"torch": "0"}, {"gpus": "2", "driver": "2", "python": "2", "capability": "2"}
    several: tuple[tuple[dict[str, str], ...], ...] = ((older, {}, {}), (older, {}), ({}, other))
    findings = [
        *(compare.alike([{"host": host, **same, **own} for host, own in zip("abc", nodes, strict=False)])
          for nodes in several),
        *(compare.clock("b", behind, "a") for behind in (0.0, 4.0, 60.4, -9)),
    ]  # fmt: skip
    told(str(finding) for found in findings for finding in found)


def test_exit_codes() -> None:
    warning, problem, unreachable = (
        Finding(level, "a", "x", "text", "advice") for level in ("warning", "problem", "unreachable")
    )
    assert exit_code([]) == exit_code([warning]) == 0
    assert exit_code([warning, unreachable]) == 70
    assert exit_code([unreachable, problem]) == 64
    [finding] = findings_of(UserError("run.dir=x: denied: ask"), "a", "run.dir")
    assert str(finding) == "problem on a (run.dir): run.dir=x: denied: ask"


# --- which network NCCL takes: there is no GPU here, so NCCL and its log are the stand-in ---

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


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_each_hosts_network_is_told(broken: bool, nodes: Nodes, tmp_path: Path, told: Told) -> None:
    """Host b has a device that NCCL does not take; or NCCL fails there."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    nodes.net.run("b", ["sh", "-c", "mount -t tmpfs tmpfs /sys/class; mkdir -p /sys/class/infiniband/mlx5_0"])
    logs = {"a": ROCE, "b": "" if broken else NO_VERBS}
    env = {host: {"PYTHONPATH": str(tmp_path), "LOG": log} for host, log in logs.items()}
    done = nodes.check("--seconds=60", env=env)
    assert [code for code, _ in done.values()] == [0, 0], done
    lines = [line for _, output in done.values() for line in output.splitlines() if "NCCL" in line]
    told([line for line in lines if "sets" not in line], *(line.split()[3] for line in lines if " GB/s " in line))
