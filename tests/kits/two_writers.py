"""One of two processes that write snapshots together: `python two_writers.py RANK FOLDER`; prints the outcome as JSON.

The second one's first write takes until the first one has given up waiting for it: an event, a file, ends it.
"""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from mingpt.atomic import Buffer
from mingpt.snapshot.retention import Retention
from mingpt.snapshot.store import Store
from mingpt.snapshot.writer import SnapshotWriter
from snapshot_kit import ALONE, PROVENANCE, state_of

GROUP_SECONDS = 2.0


rank, folder = int(sys.argv[1]), Path(sys.argv[2])
gone = folder / "gone"


class Hanging(Store):
    def write(self, step: int | None, name: str, pieces: Iterable[Buffer]) -> None:
        while rank == 1 and not gone.exists():
            time.sleep(0.01)
        super().write(step, name, pieces)


store = dist.FileStore(str(folder / "rendezvous"), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
side = replace(ALONE, rank=rank, size=2, local_rank=rank).side_group(60)
dist.distributed_c10d._set_pg_timeout(timedelta(seconds=GROUP_SECONDS), side.group)  # to make it may take longer
said: list[str] = []
writer = SnapshotWriter(Hanging(str(folder / "snapshots")), side, Retention(9), PROVENANCE, said.append)
writer.start(1, state_of(1))
try:
    outcome = writer.wait(200)
except Exception as error:
    outcome = str(error)
gone.touch()
print(json.dumps({"first": outcome, "failures": writer.failures, "broken": writer.broken, "said": said}), flush=True)
