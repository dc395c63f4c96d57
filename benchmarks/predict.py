"""`python benchmarks/predict.py [--check LINKS.json] [--out FILE.png]`: step time, goodput, cost for 1 to 1,000 nodes.

A model of few constants. All of them are options, since they follow from machines and networks; the defaults are those
of four L4 a node **as the data sheets have them, not measured**. --check compares the model of a step with what
`benchmarks/links.py --mbit 100000 1000 300 100` has measured: the fastest link gives the seconds without a network, and
the others are predicted (100 Mbit/s is the one that a constant was fitted to).
"""

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from bytes import bytes_a_step

# Of a link's speed, what an exchange of two hops and back gets: fitted to 100 Mbit/s of links.py. Four phases come one
# after the other, and the small model there has two buckets, so next to nothing is sent during backward. A large one
# has many, and should do better: not measured.
LINK_USE = 0.73


def step_seconds(
    nodes: int, each: int, microbatches: int, microbatch_seconds: float, parameters: int, mbit: float
) -> float:
    """Of one step: the microbatches of a process, and the exchange."""
    world, link = nodes * each, LINK_USE * mbit * 1e6 / 8
    computing = math.ceil(microbatches / world) * microbatch_seconds
    if nodes == 1:
        return computing
    return computing + bytes_a_step(parameters, microbatches, [each] * nodes) / link


def goodput(nodes: int, mtbf_hours: float, restart_seconds: float, stall_seconds: float) -> tuple[float, float]:
    """(the part of the time that counts, the best seconds between snapshots: Young 1974, Daly 2006)."""
    between = mtbf_hours * 3600 / nodes  # failures of any node
    interval = math.sqrt(2 * stall_seconds * between)
    lost = stall_seconds / interval + (interval / 2 + restart_seconds) / between
    return max(0.0, 1 - lost), interval


def check(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measured and predicted tokens a second of exact runs on two nodes of two processes."""
    tokens, parameters = 4 * 128 * 4, 10_721_664
    measured = {
        mbit: statistics.median(r["tokens/s"] for r in rows if r.get("how") == "exact" and r["mbit"] == mbit)
        for mbit in sorted({r["mbit"] for r in rows if "how" in r})
    }
    free = tokens / measured.pop(max(measured))  # seconds of a step: one microbatch, and no network to speak of
    found = []
    for mbit, speed in measured.items():
        predicted = tokens / step_seconds(2, 2, 4, free, parameters, mbit)
        found.append({"mbit": mbit, "measured": speed, "predicted": round(predicted), "error": predicted / speed - 1})
    return found


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    nodes = [row["nodes"] for row in rows]
    for axis, names in ((left, ("efficiency", "goodput")), (right, ("cost of 10B tokens",))):
        for name in names:
            axis.plot(nodes, [row[name] for row in rows], marker="o", markersize=3, label=name)
        axis.set(xscale="log", xlabel="nodes", ylim=(0, None))
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=Path, metavar="LINKS.json")
    parser.add_argument("--out", type=Path, metavar="FILE.png")
    parser.add_argument("--parameters", type=int, default=124_000_000)
    parser.add_argument("--each", type=int, default=4, help="GPUs of a node")
    parser.add_argument("--per-process", type=int, default=4, help="microbatches of a process in a step")
    parser.add_argument("--tokens", type=int, default=8192, help="of a microbatch")
    parser.add_argument("--microbatch-seconds", type=float, default=0.15)
    parser.add_argument("--gbit", type=float, default=25)
    parser.add_argument("--mtbf-hours", type=float, default=24 * 30, help="of one node")
    parser.add_argument("--restart-seconds", type=float, default=30)
    parser.add_argument("--stall-seconds", type=float, default=0.2)
    parser.add_argument("--price", type=float, default=3.0, help="of a node for an hour")
    o = parser.parse_args()
    if o.check:
        for row in check([json.loads(line) for line in o.check.read_text().splitlines()]):
            print(json.dumps({**row, "error": round(row["error"], 3)}))
    rows = list[dict[str, Any]]()
    for nodes in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000):
        world = nodes * o.each
        seconds = step_seconds(
            nodes, o.each, world * o.per_process, o.microbatch_seconds, o.parameters, o.gbit * 1000
        )  # fmt: skip
        good, interval = goodput(nodes, o.mtbf_hours, o.restart_seconds, o.stall_seconds)
        speed = world * o.per_process * o.tokens / seconds
        row = {"nodes": nodes, "step seconds": seconds, "efficiency": o.per_process * o.microbatch_seconds / seconds}
        row |= {"goodput": good, "seconds between snapshots": interval, "tokens/s": speed * good}
        row["cost of 10B tokens"] = 1e10 / (speed * good) / 3600 * nodes * o.price
        rows.append(row)
        print(json.dumps({key: round(value, 3) for key, value in row.items()}))
    if o.out:
        draw(rows, o.out)


if __name__ == "__main__":
    main()
