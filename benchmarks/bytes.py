"""`python benchmarks/bytes.py`: the bytes that the exact sum sends / those of a ring all-reduce; computed, not timed.

mean: over the processes. most: of the process that sends most.
"""

import json
import statistics

from mingpt.compute.tree import whole_nodes
from mingpt.world.world import share


def main() -> None:
    rows = []
    for world, microbatches in [(2, 16), (4, 16), (16, 64), (3, 12), (3, 48), (6, 48), (5, 64), (7, 64)]:
        shares = [share(r, world, microbatches) for r in range(world)]
        partial_sums = [len(whole_nodes(s.start, s.stop, 0, microbatches)) for s in shares]
        # The all-to-all sends each partial sum, the all-gather one sum; a ring all-reduce sends the gradients twice. A
        # process sends all but its own slice of each: the factor (world - 1) / world, which cancels.
        mean, most = (statistics.mean(partial_sums) + 1) / 2, (max(partial_sums) + 1) / 2
        rows.append({"processes": world, "M": microbatches, "mean": round(mean, 2), "most": round(most, 2)})
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
