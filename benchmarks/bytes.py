"""`python benchmarks/bytes.py`: the bytes that the exact sum sends / those of a ring all-reduce; computed, not timed.

mean: over the processes. most: of the process that sends most. card: of nodes with several processes, what the busiest
network card sends; in one hop: if each process sent all that it holds to the others.
"""

import json
import statistics

from mingpt.compute.exchange import held
from mingpt.preflight.helper import bytes_a_step


def main() -> None:
    rows = list[dict[str, float]]()
    for world, microbatches in [(2, 16), (4, 16), (16, 64), (3, 12), (3, 48), (6, 48), (5, 64), (7, 64)]:
        partial_sums = [len(nodes) for nodes in held(world, microbatches)]
        # The all-to-all sends each partial sum, the all-gather one sum; a ring all-reduce sends the gradients twice. A
        # process sends all but its own slice of each: the factor (world - 1) / world, which cancels.
        mean, most = (statistics.mean(partial_sums) + 1) / 2, (max(partial_sums) + 1) / 2
        rows.append({"processes": world, "M": microbatches, "mean": round(mean, 2), "most": round(most, 2)})
    for nodes, each, microbatches in [(2, 2, 16), (2, 8, 64), (4, 4, 64), (8, 8, 64), (3, 4, 48), (125, 8, 2000)]:
        world = nodes * each
        ring = 2 * (world - 1) / world * 4
        sums = [len(nodes_of_one) for nodes_of_one in held(world, microbatches)]
        first_hop = [sum(sums[n * each : (n + 1) * each]) * (world - each) / world for n in range(nodes)]
        one_hop = 4 * (max(first_hop) + (world - 1) / world)
        card = bytes_a_step(1_000_000, microbatches, [each] * nodes) / 1_000_000
        rows.append({"nodes": nodes, "processes of each": each, "M": microbatches, "card": round(card / ring, 2)})
        rows[-1]["card, in one hop"] = round(one_hop / ring, 2)
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
