"""Two hosts, good or broken in one way: preflight names what is wrong, where, and what to do, and always ends."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

import mingpt
from mingpt.errors import UserError
from mingpt.preflight import command as preflight
from mingpt.preflight import compare, meeting, messages
from mingpt.preflight.finding import Finding, exit_code, findings_of
from mingpt.preflight.helper import Helper, Unreached, answer
from mingpt.preflight.machine import source_sha256
from net_kit import Net, hosts, needs_hosts
from node_kit import free_port
from store_kit import HIDDEN, Moto, ProxiedMoto

LIMIT = 300  # seconds
RULES = ("Unconditional", "Denied")  # of a proxy before a store
OPEN_PORTS = "open all TCP ports between the nodes (security group, ufw, iptables)"


class Nodes:
    """Host a is the head; both are given its name, and nothing else."""

    def __init__(self, net: Net, folder: Path) -> None:
        self.net, self.run_dir = net, folder / "run"

    def check(
        self,
        *options: str,
        on: Sequence[str] = ("a", "b"),
        env: Mapping[str, Mapping[str, str]] | None = None,
        json: bool = True,
    ) -> dict[str, tuple[int, str]]:
        """The exit code and the output of preflight on each host."""
        common = ["--nnodes=2", "--rdzv-endpoint=a:29500", "--seconds=20", f"run.dir={self.run_dir}"]
        command = [sys.executable, "-m", "mingpt.preflight", *common, *["--json"] * json, *options]
        started = {host: self.net.popen(host, command, (env or {}).get(host)) for host in on}
        done = {}
        for host, process in started.items():
            output, _ = process.communicate(timeout=LIMIT)
            done[host] = process.returncode, output
        return done

    def findings(self, *options: str, env: Mapping[str, Mapping[str, str]] | None = None) -> tuple[int, list[str]]:
        """What both say alike: the exit code, and each finding as people see it."""
        done = self.check(*options, env=env)
        reports = [parsed(output) for _, output in done.values()]
        assert reports[0]["findings"] == reports[1]["findings"]
        assert done["a"][0] == done["b"][0] == reports[0]["code"] == reports[1]["code"]
        return done["a"][0], shown(reports[0])


def parsed(output: str) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(output)
    except ValueError:
        raise AssertionError(output) from None
    return report


def shown(report: Mapping[str, Any]) -> list[str]:
    return [str(Finding(**finding)) for finding in report["findings"]]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    addresses = {"a": "10.98.0.11", "b": "10.98.0.12"}
    with hosts(addresses, interfaces={"a": "ens1f1", "b": "ens1f0np0"}, own={"a": "127.0.1.1"}) as net:
        yield Nodes(net, tmp_path)


@needs_hosts
@pytest.mark.slow
class TestNodes:
    def test_good_ones(self, nodes: Nodes) -> None:
        done = nodes.check(json=False)
        assert [code for code, _ in done.values()] == [0, 0], done
        head, a, b, a_sets, b_sets, reduced, end, _ = done["a"][1].split("\n")
        assert head.split()[:4] == ["node", "host", "address", "interface"]
        assert a.split()[:4] == ["0", "a", "10.98.0.11", "ens1f1"]
        assert b.split()[:4] == ["1", "b", "10.98.0.12", "ens1f0np0"]
        infiniband = "" if Path("/sys/class/infiniband").is_dir() else " NCCL_IB_DISABLE=1"
        assert a_sets == f"a sets NCCL_SOCKET_IFNAME==ens1f1 GLOO_SOCKET_IFNAME=ens1f1{infiniband}"
        assert b_sets == f"b sets NCCL_SOCKET_IFNAME==ens1f0np0 GLOO_SOCKET_IFNAME=ens1f0np0{infiniband}"
        assert re.fullmatch(r"all-reduce over TCP: \d+ MB/s from each node", reduced)
        assert re.fullmatch(r"preflight in \d+\.\d s: nodes 2, problems 0, warnings 0", end)
        assert re.fullmatch(
            r"preflight in \d+\.\d s: nodes 2, problems 0, warnings 0 \(the table is in a's output\)\n", done["b"][1]
        )
        assert list(nodes.run_dir.iterdir()) == []

    def test_training_may_take_the_port_at_once(self, nodes: Nodes) -> None:
        assert nodes.findings() == (0, [])
        bind = "from mingpt.world.network import listen; listen('a', 29500, True)"
        assert nodes.net.run("a", [sys.executable, "-c", bind]).returncode == 0

    def test_an_interface_that_is_not_there(self, nodes: Nodes) -> None:
        code, findings = nodes.findings(env={"b": {"GLOO_SOCKET_IFNAME": "ens1f1"}})
        assert code == 64
        assert [re.sub("only .*?:", "only …:", f) for f in findings] == [
            "problem on b (interface): GLOO_SOCKET_IFNAME=ens1f1 in the environment: this node (b) has no such "
            "interface, only …: unset it, then the one that leads to the other nodes is found"
        ]

    def test_an_interface_that_leads_elsewhere(self, nodes: Nodes) -> None:
        nodes.net.run("b", ["ip", "link", "add", "docker0", "type", "bridge"])
        nodes.net.run("b", ["ip", "addr", "add", "172.17.0.1/16", "dev", "docker0"])
        nodes.net.run("b", ["ip", "link", "set", "docker0", "up"])
        assert nodes.findings(env={"b": {"NCCL_SOCKET_IFNAME": "docker"}}) == (
            64,
            [
                "problem on b (interface): NCCL_SOCKET_IFNAME=docker leads to 172.17.0.1, where a does not reach it "
                "(Network is unreachable): unset it, then the interface that leads to the other nodes is found"
            ],
        )

    def test_the_heads_port_is_closed(self, nodes: Nodes) -> None:
        nodes.net.close_port("a", 29500)
        done = nodes.check()
        assert (done["a"][0], shown(parsed(done["a"][1]))) == (
            70,
            [
                "unreachable on node 1 (nodes): has not come within 20 s: see whether it is up, what its log says, and "
                "whether it reaches port 29500 of a"
            ],
        )
        assert (done["b"][0], shown(parsed(done["b"][1]))) == (
            64,
            [
                "problem on b (ports): a (10.98.0.11) is up, but does not answer at port 29500: a firewall drops what "
                f"comes for it: {OPEN_PORTS}"
            ],
        )

    def test_other_ports_are_closed(self, nodes: Nodes) -> None:
        nodes.net.close_port("a", "29501-65534")
        code, findings = nodes.findings()
        assert code == 64
        assert findings == [
            "problem on a (ports): no way to b (10.98.0.12) at a free port (no answer), though they have met at the "
            f"head's: {OPEN_PORTS}",
            "problem on b (ports): no way to a (10.98.0.11) at a free port (no answer), though they have met at the "
            f"head's: {OPEN_PORTS}",
        ]

    def test_the_heads_name_means_loopback(self, nodes: Nodes) -> None:
        file = nodes.net.hosts_file("b")
        file.write_text(file.read_text().replace("10.98.0.11 a", "127.0.1.1 a"))
        done = nodes.check()
        assert done["a"][0] == 70
        assert (done["b"][0], shown(parsed(done["b"][1]))) == (
            64,
            [
                "problem on b (names): a, the head's name, means 127.0.1.1 here, which is this node itself: correct "
                "/etc/hosts or the DNS, or give an address that means the head on every node"
            ],
        )

    def test_the_heads_name_means_nothing(self, nodes: Nodes) -> None:
        file = nodes.net.hosts_file("b")
        file.write_text(file.read_text().replace("10.98.0.11 a", ""))
        code, output = nodes.check(on=["b"])["b"]
        assert code == 64
        assert output.startswith("error: --rdzv-endpoint=a: ")
        assert output.endswith(": give an address that this node can reach\n")

    def test_large_packets_are_lost(self, nodes: Nodes) -> None:
        nodes.net.swallow("b")
        advice = (
            "lower the interface's MTU until they pass (ip link set dev NAME mtu 1400), or let ICMP's 'fragmentation "
            "needed' through"
        )
        assert nodes.findings() == (
            64,
            [
                f"problem on a (mtu): large packets to or from b (10.98.0.12) are lost, small ones pass: {advice}",
                f"problem on b (mtu): large packets to or from a (10.98.0.11) are lost, small ones pass: {advice}",
            ],
        )

    def test_a_slow_network_that_loses_packets_is_no_problem(self, nodes: Nodes) -> None:
        nodes.net.slow("b", 0.1, 0.015)
        assert nodes.findings("--seconds=40") == (0, [])

    def test_a_full_disk(self, nodes: Nodes) -> None:
        nodes.net.small_disk("b", nodes.run_dir, "64k")
        nodes.net.run("b", ["dd", "if=/dev/zero", f"of={nodes.run_dir}/filled", "bs=128k", "count=1"])
        code, findings = nodes.findings()
        assert code == 64
        assert findings == [
            f"problem on b (run.dir): run.dir={nodes.run_dir}: the disk is full: free some space or choose another "
            f"place",
            f"warning on b (disk): snapshot.dir={nodes.run_dir}/snapshots has 0 MiB free, and snapshot.keep=3 takes "
            f"about 37 MiB: free some space, choose another place, or keep fewer",
        ]

    def test_a_run_directory_that_is_not_shared(self, nodes: Nodes) -> None:
        nodes.net.small_disk("b", nodes.run_dir, "100m")
        advice = "give a run.dir that all nodes share: a bucket, or a folder on a shared file system"
        assert nodes.findings() == (
            64,
            [
                f"problem on a (run.dir): what b wrote into run.dir is not seen here: {advice}",
                f"problem on b (run.dir): what a wrote into run.dir is not seen here: {advice}",
            ],
        )

    def test_a_bucket_that_says_no(self, nodes: Nodes, tmp_path: Path) -> None:
        memory = Moto(tmp_path)
        granted, denied = (ProxiedMoto(tmp_path, memory=memory, host="0.0.0.0", rule=r) for r in RULES)
        for server in (memory, granted, denied):
            nodes.net.popen("a", server.command())
            wait = (
                f"import socket, time\nwhile socket.socket().connect_ex(('127.0.0.1', {server.port})): time.sleep(0.1)"
            )
            nodes.net.run("a", [sys.executable, "-c", wait])
        client, refused = (
            server.environment(server.port) | {"FSSPEC_S3_ENDPOINT_URL": f"http://10.98.0.11:{server.port}"}
            for server in (granted, denied)
        )
        make_bucket = "import fsspec; fsspec.filesystem('s3').mkdir('runs')"
        assert nodes.net.popen("a", [sys.executable, "-c", make_bucket], client).wait(LIMIT) == 0
        bucket = "run.dir=s3://runs/x"
        warning = "this store has no conditional put: never start two runs in one run.dir, or choose another store"
        assert nodes.findings(bucket, env={"a": client, "b": client}) == (
            0,
            [f"warning on {n} (run.dir): snapshot.dir=s3://runs/x/snapshots: {warning}" for n in "ab"],
        )
        done = nodes.check(bucket, env={"a": client, "b": refused})
        assert [code for code, _ in done.values()] == [64, 64]
        assert shown(parsed(done["a"][1]))[0] == (
            "problem on b (run.dir): run.dir=s3://runs/x: permission denied: check it, or the credentials in the "
            "environment"
        )
        assert HIDDEN not in done["a"][1] + done["b"][1]

    def test_another_torch_on_one_node(self, nodes: Nodes, tmp_path: Path) -> None:
        info = tmp_path / "older" / "torch-2.9.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1\n")
        root = Path(mingpt.__file__).parent.parent
        code, findings = nodes.findings(env={"b": {"PYTHONPATH": f"{info.parent}:{root}"}})
        assert code == 64
        assert [re.sub("2\\.[1-9]\\S+ on a", "… on a", f) for f in findings] == [
            "problem on b (versions): torch 2.9.1, and … on a: install the versions of constraints.txt on every node "
            "(bash recipes/setup.sh)"
        ]

    def test_a_node_that_does_not_come(self, nodes: Nodes) -> None:
        code, output = nodes.check(on=["a"], json=False)["a"]
        assert code == 70
        assert output.splitlines()[-2:-1] == [
            "unreachable on node 1 (nodes): has not come within 20 s: see whether it is up, what its log says, and "
            "whether it reaches port 29500 of a"
        ]

    @pytest.mark.parametrize("up", [True, False])
    def test_a_head_that_does_not_come(self, nodes: Nodes, up: bool) -> None:
        if not up:
            nodes.net.cut("a")
        code, output = nodes.check(on=["b"])["b"]
        assert code == 70
        assert shown(parsed(output)) == [
            "unreachable on b (ports): nothing listens at port 29500 of a (10.98.0.11): see whether that node is the "
            "head, and what its log says; start preflight there, too"
            if up
            else "unreachable on b (ports): no answer at all from a (10.98.0.11) (No route to host): see whether that "
            "node is up, whether the address is right, and whether a firewall drops all that comes"
        ]

    def test_nodes_that_expect_different_numbers(self, nodes: Nodes) -> None:
        common = [sys.executable, "-m", "mingpt.preflight", "--rdzv-endpoint=a:29500", "--seconds=20", "--json"]
        place = f"run.dir={nodes.run_dir}"
        head = nodes.net.popen("a", [*common, "--nnodes=2", place])
        other = nodes.net.run("b", [*common, "--nnodes=3", place], limit=LIMIT)
        assert (other.returncode, shown(parsed(other.stdout))) == (
            64,
            [
                "problem on b (nodes): the head expects 2 nodes, and this node 3: give the same --nnodes to all nodes",
            ],
        )
        head.communicate(timeout=LIMIT)
        assert head.returncode == 70


def test_one_node(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mingpt.preflight", "--json", f"run.dir={tmp_path}", "train.threads=1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    report = parsed(done.stdout)
    assert done.returncode == report["code"] == 0
    facts = report["nodes"][0]["facts"]
    assert [f for f in shown(report) if "(cpu)" in f] == [
        f"warning on {facts['host']} (cpu): processes=1, train.threads=1000 and data.workers=0 want 1000 CPUs, and "
        f"{facts['cpus']} are there: give the job more CPUs, or start fewer processes"
    ]
    assert facts["project"] == f"{mingpt.__version__} {source_sha256()[:8]}"
    assert list(tmp_path.iterdir()) == []


def on_loopback(folder: Path, rank: int, port: int, **env: str) -> "subprocess.Popen[str]":
    place = ["--nnodes=2", f"--node-rank={rank}", f"--rdzv-endpoint=127.0.0.1:{port}", f"run.dir={folder}"]
    return subprocess.Popen(
        [sys.executable, "-m", "mingpt.preflight", "--json", "--seconds=30", *place],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | env,
    )


@pytest.mark.slow
def test_two_launchers_on_one_machine(tmp_path: Path) -> None:
    port = free_port()
    both = [on_loopback(tmp_path, rank, port) for rank in (0, 1)]
    outputs = [process.communicate(timeout=LIMIT)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert [[n["environment"] for n in parsed(output)["nodes"]] for output in outputs] == [[None, None]] * 2


@pytest.mark.parametrize(
    ("shape", "answers"),
    [
        (messages.MET, [["a", "b"], [7]]),
        (messages.MET, [["a", "b"]]),
        (messages.MET, [None, ["a", "b"]]),
        (messages.NODES, [{}]),
        (messages.PLACES, {}),
        (messages.FINDINGS, [[], [{"level": "fine"}]]),
        (messages.RESULTS, [1.0, {}]),
    ],
)
def test_answers_of_another_shape_are_none(shape: TypeAdapter[list[Any]], answers: object) -> None:
    with pytest.raises(Unreached):
        messages.read(shape, answers, 2)


@pytest.mark.slow
def test_a_message_of_another_version_is_one_finding(tmp_path: Path) -> None:
    port, node = free_port(), Helper()
    head = on_loopback(tmp_path, 0, port)
    try:
        while True:
            with suppress(OSError, Unreached):
                answer(node.ask(meeting.meet, "127.0.0.1", port, None, 1, 2, 5.0), LIMIT)
                break
        node.ask(meeting.gather, [7], 0.0)
        output, _ = head.communicate(timeout=LIMIT)
    finally:
        node.end()
    (finding,) = parsed(output)["findings"]
    assert (head.returncode, finding["level"], finding["check"]) == (70, "unreachable", "nodes")
    assert "node 1" in finding["text"]


def test_under_slurm_the_head_has_no_loopback_address(tmp_path: Path) -> None:
    process = on_loopback(tmp_path, 0, 29500, SLURM_JOB_ID="7")
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 64
    assert [f.partition(" (")[2] for f in shown(parsed(output)) if "(names)" in f] == [
        "names): 127.0.0.1 as the head's address means each node itself: correct /etc/hosts or the DNS, or give an "
        "address that means the head on every node"
    ]


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        process = on_loopback(tmp_path, 0, port)
        output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 64
    assert [f.partition(" (")[2] for f in shown(parsed(output)) if "(ports)" in f] == [
        f"ports): port {port} can't be opened here (Address already in use): stop what listens there, or choose "
        f"another port"
    ]


def test_a_mistake_in_the_config_is_told_first(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mingpt.preflight", f"run.dir={tmp_path}", "train.max_step=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 64
    assert done.stderr.startswith("error: train.max_step")


def node(host: str, **facts: Any) -> dict[str, Any]:
    same: dict[str, Any] = {
        "torch": "2.13.0",
        "nccl": None,
        "project": "1",
        "python": "3.12.1",
        "driver": None,
        "gpus": [],
    }
    return {"host": host, **same, "capability": "AVX2", **facts}


def test_the_most_common_version_is_right_and_the_head_decides_a_tie() -> None:
    three = [node("a", torch="2.9"), node("b"), node("c")]
    assert [f.text for f in compare.alike(three)] == ["torch 2.9, and 2.13.0 on b, c"]
    two = [node("a", torch="2.9"), node("b")]
    assert [(f.node, f.text) for f in compare.alike(two)] == [("b", "torch 2.13.0, and 2.9 on a")]


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_a_time_that_is_none_is_a_mistake(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert preflight.main([f"--seconds={seconds}"]) == 64
    assert capsys.readouterr().err == f"error: --seconds {seconds}: give a number, 0 or more\n"


def test_what_else_may_differ() -> None:
    a = node("a", gpus=["L4", "L4"], driver="550", python="3.12.1")
    b = node("b", gpus=["L4"], driver="560", python="3.11.2")
    assert [(f.level, f.text) for f in compare.alike([a, b])] == [
        ("warning", "Python 3.11.2, and 3.12.1 on a"),
        ("warning", "driver 560, and 550 on a"),
        ("warning", "GPUs ['L4'], and ['L4', 'L4'] on a"),
    ]
    cpus = [node("a"), node("b", capability="AVX512")]
    assert [f.text for f in compare.alike(cpus)] == ["CPU instructions AVX512, and AVX2 on a"]


def test_clocks() -> None:
    findings = [found for behind in (0.0, 4.0, 60.4, -9) for found in compare.clock("b", behind, "a")]
    assert [f.text for f in findings] == ["its clock is 60 s behind that of a", "its clock is 9 s ahead of that of a"]


def test_exit_codes() -> None:
    warning, problem, unreachable = (
        Finding(level, "a", "x", "text", "advice") for level in ("warning", "problem", "unreachable")
    )
    assert exit_code([]) == exit_code([warning]) == 0
    assert exit_code([warning, unreachable]) == 70
    assert exit_code([unreachable, problem]) == 64
    assert str(findings_of(UserError("run.dir=x: denied: ask"), "a", "run.dir")[0]) == (
        "problem on a (run.dir): run.dir=x: denied: ask"
    )
