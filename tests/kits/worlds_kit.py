"""Many tiny runs, trained one after the other in the same processes."""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

from mingpt.compute.buckets import BUCKET_BYTES, make_buckets
from mingpt.errors import FINISHED
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from tests.kits.graph_kit import graphs_on_cpu
from tests.kits.replay_kit import settings_of
from tests.kits.run_kit import in_forks


def train_in_world(
    world: int,
    runs: Mapping[str, Sequence[str]],
    *settings: str,
    nodes: int = 1,
    bucket_bytes: int = BUCKET_BYTES,
    graphs: bool = False,
    except_rank: int | None = None,
) -> None:
    """Train all runs in so many processes. runs: by run.dir their settings, after which those for all.

    graphs: microbatches are replayed, but in the process `except_rank`, which captures nothing.
    """
    given = {run_dir: (*own, *settings) for run_dir, own in runs.items()}
    in_forks(world, partial(_train_all, bucket_bytes, graphs, except_rank), given, nodes)


def _train_all(bucket_bytes: int, graphs: bool, except_rank: int | None, runs: Mapping[str, Sequence[str]]) -> None:
    """A run that goes back is started again."""
    buckets = partial(make_buckets, most=bucket_bytes)
    flights = patch("mingpt.compute.buckets.BUCKET_BYTES", bucket_bytes)
    recorded = graphs_on_cpu(except_rank=except_rank) if graphs else nullcontext()
    exits, cut = patch("mingpt.world.joining._exit_after"), patch("mingpt.train.context.make_buckets", buckets)
    with exits, cut, flights, recorded as recorder:
        for run_dir, settings in runs.items():
            arguments = settings_of(run_dir, *settings)
            assert any(attempt(arguments, Lifetime()) == FINISHED for _ in range(2)), run_dir
        refused = os.environ.get("RANK") == str(except_rank)
        assert recorder is None or (recorder.replays > 0) != refused  # or the test would compare what has no graphs
