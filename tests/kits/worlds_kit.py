"""Many tiny runs, trained one after the other in the same processes."""

from collections.abc import Mapping, Sequence
from functools import partial
from unittest.mock import patch

from mingpt.compute.buckets import BUCKET_BYTES, make_buckets
from mingpt.errors import FINISHED
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from replay_kit import settings_of
from run_kit import in_forks


def train_in_world(
    world: int,
    runs: Mapping[str, Sequence[str]],
    *settings: str,
    nodes: int = 1,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Train all runs in so many processes. runs: by run.dir their settings, after which those for all."""
    given = {run_dir: (*own, *settings) for run_dir, own in runs.items()}
    in_forks(world, partial(_train_all, bucket_bytes), given, nodes)


def _train_all(bucket_bytes: int, runs: Mapping[str, Sequence[str]]) -> None:
    """A run that goes back is started again."""
    buckets = partial(make_buckets, most=bucket_bytes)
    flights = patch("mingpt.compute.buckets.BUCKET_BYTES", bucket_bytes)
    with patch("mingpt.world.joining._exit_after"), patch("mingpt.train.context.make_buckets", buckets), flights:
        for run_dir, settings in runs.items():
            arguments = settings_of(run_dir, *settings)
            assert any(attempt(arguments, Lifetime()) == FINISHED for _ in range(2)), run_dir
