"""What a campaign of crashes has done: figures for programs, a report for people."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from crash_campaign import Campaign


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
            "# Campaign of crashes",
            "",
            f"`make crash-campaign N={f['asked for']} SEED={f['seed']}`, torch {f['torch']}, "
            f"{f['seconds'] / 60:.0f} minutes.",
            "",
            f"**{f['kills']} kills, no violation**; {visited}. {f['starts']} starts of a launcher, {f['attempts']} "
            f"attempts, {runs}; each of them ended with the digest of a run that nobody disturbed, `{f['digest']}`.",
            "",
            *_table(["killed", "times"], [[kind, count] for kind, count in f["by kind"].items()]),
            *_table(["boundary", *tiers], [[place, *(tiers[tier][place] for tier in tiers)] for place in places]),
            *_table(["processes", "starts"], [[world, count] for world, count in f["starts by processes"].items()]),
        ]
    )
