"""What a campaign of crashes has done: figures for programs, a report for people."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from crash_campaign import Campaign

KINDS = {
    "worker": "one training process",
    "agent": "the launcher's own process",
    "node": "all processes of a node, with the other node alive where there are two",
    "machine": "as node, and the node's memory is lost",
    "boundary, process": "the process that writes, at a boundary of a snapshot's writes",
    "boundary, server": "the storage server, at a boundary of a snapshot's writes",
    "server": "the storage server, at a random moment",
    "stop": "no process: SIGTERM to a launcher, with much, little or no time for the last snapshot",
    "slow write": "no process: a write takes longer than the processes wait for each other; they end and are restarted",
    "double start": "no process: the run is started twice at once; the older attempt ends with 64",
    "rollback": "no process: `snapshots rewind` to an older step, while a node has newer ones in its memory",
    "server before a start": "the storage server; this start ends with 70 in bounded time, the next one continues",
}
EXPLANATION = """\
Each run trains a tiny GPT for 200 steps, with a durable snapshot every 7 steps and a hot one every 3. It uses one of
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

`tests/kits/crash_campaign.py` runs the campaign; `tests/faults/test_crash_campaign.py` runs a short one in the tests.
"""


def figures(campaign: "Campaign", seed: int, seconds: int) -> dict[str, Any]:
    plan = campaign.plan
    tiers: dict[str, dict[str, int]] = {}
    for boundary, count in sorted(plan.visits.items()):
        column = boundary.tier + (", the server dies" if boundary.victim == "server" else "")
        tiers.setdefault(column, {})[f"{boundary.when} {boundary.what}"] = count
    return {
        "kills": plan.kinds.total(),
        "asked for": plan.kills,
        "seed": seed,
        "torch": torch.__version__,
        "seconds": seconds,
        "by kind": dict(sorted(plan.kinds.items())),
        "boundaries": tiers,
        "boundaries not visited": len(plan.unvisited),
        "runs finished with the undisturbed digest": dict(sorted(campaign.runs.items())),
        "starts": campaign.starts,
        "attempts": campaign.attempts,
        "starts by processes": dict(sorted(campaign.worlds.items())),
        "digest": max(campaign.undisturbed.items())[1],
    }


def _table(titles: list[str], rows: list[list[Any]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    return [f"| {' | '.join(map(str, line))} |" for line in lines] + [""]


def markdown(f: Mapping[str, Any]) -> str:
    names = {"disk": "on disk", "bucket": "in a bucket (S3)"}
    runs = " and ".join(
        f"{count} runs {names[s]}" for s, count in f["runs finished with the undisturbed digest"].items()
    )
    tiers: dict[str, dict[str, int]] = f["boundaries"]
    places = next(iter(tiers.values()))
    left = f["boundaries not visited"]
    visited = f"{left} boundaries of writes were not visited" if left else "every boundary of a write was visited"
    return "\n".join(
        [
            "# Crash campaign",
            "",
            f"`make crash-campaign N={f['asked for']} SEED={f['seed']}`, torch {f['torch']}, "
            f"{f['seconds'] / 60:.0f} minutes.",
            "",
            f"**{f['kills']} kills, no violation**; {visited}. {f['starts']} starts of a launcher, {f['attempts']} "
            f"attempts, {runs}; each of them ended with the digest of an undisturbed run, `{f['digest']}`.",
            "",
            EXPLANATION,
            *_table(["killed", "what that is", "times"], [[k, KINDS[k], n] for k, n in f["by kind"].items()]),
            *_table(["boundary", *tiers], [[place, *(tiers[tier][place] for tier in tiers)] for place in places]),
            *_table(["processes", "starts"], [[world, count] for world, count in f["starts by processes"].items()]),
        ]
    )
