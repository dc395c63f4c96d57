"""benchmarks/sharded_weights.py, the prototype of docs/weights-in-slices.md, ends with the bits of a run."""

import json
import sys
from pathlib import Path

import pytest

from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from paths_kit import ROOT, ran
from replay_kit import settings_of
from worlds_kit import train_in_world

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

# What may break bits: dropout, blocks that are computed again, weights that travel in 16 bits, owners of whole
# matrices; five microbatches, of which the last round has one; buckets that two blocks share.
SETTINGS = (
    "data=random", "data.vocabulary=64", "model.n_embd=48", "model.n_head=3", "batch.micro_size=1",
    "batch.global_size=5", "train.max_steps=3", "optimizer=muon", "optimizer.ema=0.9", "precision=bf16",
    "train.recompute=block",
)  # fmt: skip
BUCKET_BYTES = 60_000


def test_weights_in_slices_have_the_digest_of_a_run(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    program = (sys.executable, ROOT / "benchmarks/sharded_weights.py", "--bucket-bytes", BUCKET_BYTES)
    done = ran([*program, *settings_of(run, *SETTINGS), "--worlds", 1, 2])
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["processes"], row["way"]) for row in rows] == [(n, way) for n in (1, 2) for way in ("whole", "slices")]
    train_in_world(1, {run: SETTINGS}, bucket_bytes=BUCKET_BYTES)
    assert {row["digest"] for row in rows} == {read(Store(f"{run}/snapshots"), 3).manifest.digest}
