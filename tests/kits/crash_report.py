"""What a campaign of crashes has done: figures for programs, a report for people."""

from collections.abc import Mapping
from typing import Any

from crash_plan import Plan

EXPLANATION = """\
Each run trains a tiny GPT for 120 steps, with a durable snapshot every 7 steps and a hot one every 3. It uses one of
two nodes or both, and a number of processes that changes from start to start. Its directory is on a disk or in a
bucket: of moto, behind a proxy that drops the conditions of puts. The storage server that is killed is this proxy; it
comes back within 8 seconds, on the same port, with the same data.

After each start, when all its processes have ended, every committed snapshot in the store is read and verified.
Before the next start, all hot snapshots of its nodes are, too. These rules must hold:

- The digest of each snapshot is that of the undisturbed run's same step.
- Each step that was ever seen committed is there, unless the retention policy deletes it. The newest step never goes
  back.
- The next attempt starts from the newest step that one of its nodes can see, in the store or in memory. After a
  rollback it starts from the step of the rollback, whatever is left in memory.
- No snapshot is damaged, no process is left behind, and after a run's end nothing is left in its nodes' memory.
- A launcher that was not killed ends with 0; with 70 if the other node or the storage server died; with 75 if it was
  asked to stop; or with 64 if a newer attempt has started.

What is killed: `worker`, one training process; `agent`, the launcher's own process; `node`, all processes of a node;
`machine`, the same, and the node's memory is lost; `server`, the storage server; at a boundary of a snapshot's writes,
the process that writes, or the storage server. Nothing is killed by `stop`, SIGTERM to a launcher with much, little or
no time for the last snapshot; by `double start`, of the run at once on two machines; by `rollback`, `snapshots rewind`
to an older step, while a node has newer ones in its memory.

`tests/kits/crash_campaign.py` runs the campaign; `tests/faults/test_crash_campaign.py` runs a short one in the tests.
"""


def boundaries(plan: Plan) -> dict[str, int]:
    return {f"{b.when} {b.what}, {b.tier}, {b.victim}": count for b, count in sorted(plan.visits.items())}


def markdown(figures: Mapping[str, Any]) -> str:
    """The figures' numbers as a list, and a table of each of their dicts."""
    lines = ["# Crash campaign", "", f"**{figures['kills']} kills, no violation**.", "", EXPLANATION]
    lines += [f"- {name}: {value}" for name, value in figures.items() if not isinstance(value, dict)]
    for name, counts in figures.items():
        if isinstance(counts, dict):
            lines += ["", f"| {name} | times |", "| --- | --- |", *(f"| {k} | {n} |" for k, n in counts.items())]
    return "\n".join([*lines, ""])
