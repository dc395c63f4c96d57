"""Compares the nodes: which are missing, and which differ."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mingpt.preflight.finding import Finding, Level

ENDED = "it ended or stopped answering during preflight"
CLOCK_SECONDS = 5.0  # less may be the way of a message

FABRIC = (
    "look at what NCCL_DEBUG=INFO prints; an image needs libibverbs1, ibverbs-providers and librdmacm1, a container "
    "/dev/infiniband, and EFA also libfabric and aws-ofi-nccl (docs/large.md)"
)
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
        by_host = {node["host"]: str(node[key]) for node in nodes}
        most = Counter(by_host.values()).most_common(1)[0][0]
        others = ", ".join(host for host, value in by_host.items() if value == most)
        for host, value in by_host.items():
            if value != most:
                findings.append(Finding(level, host, "versions", f"{name} {value}, and {most} on {others}", advice))
    return findings


def of_all(
    nodes: Sequence[dict[str, Any]], gathered: Sequence[list[Finding] | None], keepers: Sequence[str]
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """The findings of all nodes, and the nodes that have still answered.

    gathered: findings by rank; None: of a node that has not. keepers: the hosts that will keep snapshots.
    """
    findings = list[Finding]()
    for of_node in gathered:
        for finding in of_node or ():
            if finding.node in keepers or finding.check not in ("disk", "run.dir"):
                findings.append(finding)
            # A run that lives on another node's disk needs no room on this one's, and goes on if it can't be written.
            # But then nothing there tells, at the next start, where the run is.
            elif finding.check == "run.dir":
                findings.append(replace(finding, level="warning"))
    answered = [node for node in nodes if gathered[node["rank"]] is not None]
    findings += alike([node["facts"] for node in answered])
    for node in nodes:
        if node not in answered:
            host = node["facts"]["host"]
            findings.append(Finding("unreachable", host, "nodes", ENDED, "see what its log says"))
    return findings, answered


def absent(
    ranks: Sequence[int], level: Level, addresses: Sequence[str], head: str, port: int, seconds: float
) -> list[Finding]:
    """A finding for each node that has not come.

    addresses: of all nodes by rank; empty if the platform does not give them. seconds: how long the head has waited.
    """
    advice = f"see whether it is up, what its log says, and whether it reaches port {port} of {head}"
    findings: list[Finding] = []
    for rank in ranks:
        node = f"node {rank} ({addresses[rank]})" if addresses else f"node {rank}"
        findings.append(Finding(level, node, "nodes", f"has not come within {seconds:g} s", advice))
    return findings


def clock(node: str, behind: float, head: str) -> list[Finding]:
    """A finding if a node's clock is off. behind: seconds; each node has read its clock when all had met."""
    if abs(behind) <= CLOCK_SECONDS:
        return []
    text = f"its clock is {abs(behind):.0f} s {'behind' if behind > 0 else 'ahead of'} that of {head}"
    advice = "let chrony or ntpd set it: object stores refuse requests that are minutes off"
    return [Finding("warning", node, "clock", text, advice)]
