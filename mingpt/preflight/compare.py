"""Compares the nodes: which are missing, which differ, which reach each other badly or not at all."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mingpt.preflight.finding import Finding, Level

CLOCK_SECONDS = 5.0

INSTALL = "install the versions of constraints.txt on every node (bash recipes/setup.sh)"
# Facts that should be equal on all nodes: key, level of the finding if they differ, name, and what to do.
ALIKE: tuple[tuple[str, Level, str, str], ...] = (
    ("torch", "problem", "torch", INSTALL),
    ("nccl", "problem", "NCCL", INSTALL),
    ("project", "problem", "mingpt", "bring the same commit of this project to every node"),
    ("python", "warning", "Python", "install the same on every node"),
    ("driver", "warning", "driver", "install the same on every node: kernels, and so bits, may differ"),
    ("gpus", "warning", "GPUs", "equal weights bit for bit need GPUs of one kind; each node may have its own number"),
    (
        "capability",
        "warning",
        "CPU instructions",
        "for equal bits whatever node computes what, set ATEN_CPU_CAPABILITY to the least of them on every node",
    ),
)


def alike(nodes: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """A finding for each node whose fact differs from that of most nodes. nodes: their facts, the head's first.

    On a tie, the value that comes first counts as that of most.
    """
    findings: list[Finding] = []
    for key, level, name, advice in ALIKE:
        values = [_shown(key, node.get(key)) for node in nodes]
        most = Counter(values).most_common(1)[0][0]
        if key == "capability" and any(node["gpus"] for node in nodes):
            continue
        for node, value in zip(nodes, values, strict=True):
            if value != most:
                others = ", ".join(n["host"] for n, v in zip(nodes, values, strict=True) if v == most)
                findings.append(
                    Finding(level, node["host"], "versions", f"{name} {value}, and {most} on {others}", advice)
                )
    return findings


def _shown(key: str, value: Any) -> str:
    if key == "gpus":
        return ", ".join(f"{count} x {name}" for name, count in Counter(value).items()) or "none"
    return "none" if value is None else str(value)


def absent(
    size: int, least: int, hosts: Mapping[int, str], addresses: Sequence[str], port: int, seconds: float
) -> list[Finding]:
    """A finding for each node that has not come.

    size, least: numbers of nodes that are expected and needed. hosts: names by rank of the nodes that have come.
    addresses: of all nodes by rank; empty if the platform does not give them. seconds: how long the head has waited.
    """
    level: Level = "unreachable" if len(hosts) < least else "warning"
    return [
        Finding(
            level,
            f"node {rank}" + (f" ({addresses[rank]})" if addresses else ""),
            "nodes",
            f"has not come within {seconds:g} s",
            f"see whether it is up, what its log says, and whether it reaches port {port} of {hosts[0]}",
        )
        for rank in range(size)
        if rank not in hosts
    ]


def links(nodes: Sequence[Mapping[str, Any]], hosts: Mapping[int, str]) -> list[Finding]:
    """Findings about the links that the nodes have measured. hosts: the nodes' names by rank."""
    reached_by = {(node["rank"], address): label for node in nodes for address, label in node["addresses"]}
    findings: list[Finding] = []
    for node in nodes:
        for link in node["links"]:
            if label := reached_by.get((link["rank"], link["address"]), ""):
                findings += _chosen_link(link, label, hosts[node["rank"]], hosts[link["rank"]])
            else:
                findings += _link(link, hosts[node["rank"]], f"{hosts[link['rank']]} ({link['address']})")
    return findings


def _chosen_link(link: Mapping[str, Any], label: str, node: str, peer: str) -> list[Finding]:
    """A link to an address that is used only because a variable of the peer's environment (`label`) chooses it."""
    if not link["error"]:
        return []
    text = f"{label} leads to {link['address']}, where {node} does not reach it ({link['error']})"
    advice = "unset it, then the interface that leads to the other nodes is found"
    return [Finding("problem", peer, "interface", text, advice)]


def _link(link: Mapping[str, Any], node: str, where: str) -> list[Finding]:
    if link["error"]:
        text = f"no way to {where} at a free port ({link['error']}), though they have met at the head's"
        advice = "open all TCP ports between the nodes (security group, ufw, iptables)"
        return [Finding("problem", node, "ports", text, advice)]
    if not link["large"]:
        text = f"large packets to or from {where} are lost, small ones pass"
        advice = (
            "lower the interface's MTU until they pass (ip link set dev NAME mtu 1400), or let ICMP's "
            "'fragmentation needed' through"
        )
        return [Finding("problem", node, "mtu", text, advice)]
    return []


def clocks(nodes: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Each node has read its clock when all had met."""
    head = nodes[0]
    return [
        Finding(
            "warning",
            node["facts"]["host"],
            "clock",
            f"its clock is {abs(late):.0f} s {'behind' if late > 0 else 'ahead of'} that of {head['facts']['host']}",
            "let chrony or ntpd set it: object stores refuse requests that are minutes off",
        )
        for node in nodes
        if abs(late := head["clock"] - node["clock"]) > CLOCK_SECONDS
    ]


def places(nodes: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """A finding for each node that does not see the files that the others have written into run.dir."""
    findings = []
    writers = [node for node in nodes if node["written"]]
    for node in nodes:
        if node["seen"] is None:
            continue
        unseen = [n["facts"]["host"] for n in writers if n["identity"] not in node["seen"]]
        if unseen:
            text = f"what {', '.join(unseen)} wrote into run.dir is not seen here"
            advice = "give a run.dir that all nodes share: a bucket, or a folder on a shared file system"
            findings.append(Finding("problem", node["facts"]["host"], "run.dir", text, advice))
    return findings
