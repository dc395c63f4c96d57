"""One all-reduce over gloo between all nodes: whether it works, how fast it is, and what that means for training."""

from typing import Any

from mingpt.config.schema import Config
from mingpt.errors import FINISHED
from mingpt.preflight import machine
from mingpt.preflight.finding import Finding, exit_code
from mingpt.preflight.helper import Helper
from mingpt.preflight.meeting import SHORT_SECONDS, Meeting

REDUCE_SECONDS = 15  # on good nodes it takes a fraction of that
LARGE, SMALL = 2**23, 2**15  # bytes of an all-reduce


def measure(
    config: Config, helper: Helper, meeting: Meeting, nodes: list[dict[str, Any]], findings: list[Finding]
) -> list[str]:
    """Called on all nodes at once. Returns a line about the speed, and adds the nodes where it failed to `findings`."""
    port = None
    if meeting.rank == 0:
        helper.send(do="host")
        port = helper.receive(REDUCE_SECONDS).get("port")
    port = meeting.gather(port, REDUCE_SECONDS)[0]
    where = {"host": nodes[0]["facts"]["address"], "port": port, "rank": meeting.rank, "size": meeting.size}
    environment = nodes[meeting.rank]["environment"] or {}
    # Where packets are late or lost, TCP may take minutes for what takes milliseconds elsewhere.
    count = SMALL if {"delay", "loss"} & {f.check for f in findings} else LARGE
    helper.send(do="reduce", **where, count=count, seconds=REDUCE_SECONDS / 2, environment=environment)
    results = meeting.gather(helper.receive(REDUCE_SECONDS), REDUCE_SECONDS + SHORT_SECONDS)
    for node, result in zip(nodes, results, strict=True):
        if not result or "error" in result:
            text = f"an all-reduce over gloo failed ({result['error'] if result else 'no answer'})"
            advice = "open all TCP ports between the nodes, and look at the interfaces above"
            findings.append(Finding("problem", node["facts"]["host"], "all-reduce", text, advice))
    if exit_code(findings) != FINISHED:
        return []
    slowest = min(result["bandwidth"] for result in results)
    cost = meeting.gather(_cost(config, helper, [n["processes"] for n in nodes], slowest), SHORT_SECONDS)[0]
    return [f"all-reduce over TCP: {slowest / 1e6:.0f} MB/s from each node{cost}"]


def _cost(config: Config, helper: Helper, processes: list[int], bandwidth: float) -> str:
    """What the exact sum of a step sends at this speed; empty for a model whose size only its own code knows."""
    count = machine.parameters(config)
    microbatches = config.global_size(sum(processes)) // (config.batch.micro_size or 1)
    helper.send(do="bytes", parameters=count, microbatches=microbatches, processes=processes)
    sent = helper.receive(SHORT_SECONDS).get("value")
    if not sent:
        return ""
    return (
        f"; the exact sum of about {count / 1e6:.1f} M gradients sends {sent / 1e6:.0f} MB: "
        f"{sent / bandwidth:.2f} s of each step, part of it while computing"
    )
