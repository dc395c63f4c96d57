"""A run whose directory is a bucket, on a real S3 server (moto) on loopback."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mingpt.commands import snapshots
from mingpt.observe.jsonl import read_metrics
from mingpt.snapshot.retention import Retention, leftovers
from mingpt.snapshot.store import Store
from node_kit import ask_to_stop
from run_kit import Run
from snapshot_kit import save
from store_kit import Stores

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(serve: Stores) -> str:
    """The URL of an empty bucket; this process and those it starts find the server through the environment."""
    return serve("moto").url


@pytest.mark.example
def test_a_run_in_a_bucket_is_killed_resized_and_ends_with_the_same_bits(
    bucket: str, text: Path, cache: Path, undisturbed: Callable[..., Run]
) -> None:
    run = Run(f"{bucket}/there", text, cache)
    started = run.start(2, restarts=5)
    kills = [6, 13]
    chooser = random.Random(3)

    def kill(step: int) -> None:
        if kills and step >= kills[0]:
            kills.pop(0)
            os.kill(chooser.choice(started.workers()), signal.SIGKILL)
        if step == 20:
            ask_to_stop(started.process.pid, workers=started.workers())

    started.on_step = kill
    started.wait()
    assert kills == []
    assert run.store.steps()[0] in range(20, 24)
    output = started.output + run.finish(3)
    assert run.digest() == undisturbed().digest()
    assert [row["step"] for row in read_metrics(run.dir)] == list(range(1, 25))
    manifest = run.store.read_manifest(24).decode()
    assert "nobody-may-see" not in output + manifest


def test_text_is_read_from_a_bucket_and_a_missing_bucket_is_a_mistake(
    bucket: str, text: Path, cache: Path, tmp_path: Path, undisturbed: Callable[..., Run]
) -> None:
    import fsspec

    fsspec.filesystem("s3").put_file(str(text), "runs/text.txt")
    run = Run(str(tmp_path / "run"), text, cache)
    run.finish(1, f"data.path={bucket}/text.txt")
    assert run.digest() == undisturbed().digest()
    started = run.start(1, "data.path=s3://nowhere/text.txt")
    assert started.wait() == 64
    assert "error: data.path=s3://nowhere/text.txt: there is no such file or bucket" in started.output


def test_a_bucket_keeps_what_stays_is_cleaned_and_copied(bucket: str, tmp_path: Path) -> None:
    store = Store(f"{bucket}/kept/snapshots")
    for step in (1, 2, 3, 4, 5):
        save(store, step, keep=Retention(2, keep_every=3), val_loss=float(step))
    assert store.steps() == [5, 4, 3, 1]
    store.fs.rm_file(f"{store.folder(4)}/manifest.json")
    a_day_later = time.time() + 86400
    assert [f.path for f in leftovers(store, 80000, 0)] == []
    left = leftovers(store, 80000, 0, now=lambda: a_day_later)
    assert [f.step for f in left] == [4, 4]
    store.remove(left)
    assert store.folders() == [5, 3, 1]
    for source, target in ((f"{bucket}/kept", str(tmp_path)), (str(tmp_path), f"{bucket}/again")):
        assert snapshots.main(["copy", source, target]) == 0
        assert snapshots.main(["copy", source, target]) == 0  # by now all is there
    again = Store(f"{bucket}/again/snapshots")
    assert again.steps() == [5, 3, 1]
    assert again.read_manifest(5) == store.read_manifest(5)
    assert snapshots.main(["prune", f"{bucket}/again", "--keep", "1", "--no-keep-best"]) == 0
    assert again.folders() == [5]
