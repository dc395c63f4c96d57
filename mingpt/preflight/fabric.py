"""Which network NCCL takes between the nodes, and how fast it is: all-reduces with one GPU of each node.

All else in the preflight goes over TCP. So it finds nothing wrong where NCCL misses InfiniBand or EFA (an image without
libibverbs, a container without the devices): NCCL then takes TCP, many times slower, and says so with NCCL_DEBUG=INFO
alone. This runs in a helper, last of all, since NCCL may hang or take the process with it.
"""

import os
import re
from collections.abc import Mapping, Sequence
from tempfile import NamedTemporaryFile
from typing import Any

from mingpt.preflight import meeting
from mingpt.preflight.finding import Finding

SECONDS = 60  # for NCCL's start and the all-reduces
BYTES = 2**28  # of one
ADVICE = (
    "look at what NCCL_DEBUG=INFO prints; an image needs libibverbs1, ibverbs-providers and librdmacm1, a container "
    "/dev/infiniband, and EFA also libfabric and aws-ofi-nccl (docs/large.md)"
)
# What NCCL says of the networks that it finds, with their devices, and of the one that it takes.
NETWORK = re.compile(
    r"NCCL INFO (NET/\w+ ?: Using \[0\].*|NET/OFI Selected .*|Failed to open libibverbs.*|Using network .*)"
)


def measure() -> str:
    """How fast it is, and what NCCL says of networks. After `meeting.reduce`, whose environment stays."""
    import torch.distributed as dist

    with NamedTemporaryFile("r") as log:
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": log.name}
        speed = meeting.speed([BYTES], "cuda", dist.new_group(backend="nccl")) / 1e9
        return f"{speed:.1f} GB/s from one GPU; {', '.join(NETWORK.findall(log.read()))}"


def judge(facts: Sequence[Mapping[str, Any]], results: Sequence[object], findings: list[Finding]) -> list[str]:
    """A line about NCCL on each node; what is wrong is added to `findings`.

    facts: of each node. results: what `measure` says there; None: no answer.
    """
    notes = list[str]()
    for node, result in zip(facts, results, strict=True):
        notes.append(f"NCCL on {node['host']}: {result or 'no answer'}")
        if node["infiniband"] and "network Socket" in str(result):
            text = f"NCCL takes TCP, and not {', '.join(node['infiniband'])}"
            findings.append(Finding("warning", node["host"], "nccl", text, ADVICE))
    return notes
