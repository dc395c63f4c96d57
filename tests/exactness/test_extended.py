"""A run with a stable phase can be extended exactly; another optimizer begins anew."""

from pathlib import Path

import pytest

from mingpt.cli import cli
from mingpt.snapshot.reader import read
from mingpt.snapshot.store import Store
from tests.kits.replay_kit import train_here

Captured = pytest.CaptureFixture[str]
MODERN = (
    "model=modern", "~model.dropout", "model.n_layer=1", "model.n_head=2", "model.n_kv_head=1", "model.n_embd=16",
    "data=random", "optimizer=muon",
)  # fmt: skip


@pytest.mark.slow
def test_a_run_is_extended_exactly_from_its_stable_phase(tmp_path: Path, capsys: Captured) -> None:
    """16 steps, of which 4 decay, then 24: the bits of a run that was planned for 24."""
    short, whole = f"{tmp_path}/short", f"{tmp_path}/whole"
    planned = (*MODERN, "schedule=wsd", "schedule.cooldown_steps=4", "snapshot.keep=1", "snapshot.every_steps=0")
    train_here(short, *planned, "train.max_steps=16", "schedule.decay_steps=16")
    assert cli.run("snapshots", ["prune", short, "--keep", "1", "--no-keep-best"]) == 0
    assert Store(f"{short}/snapshots").steps() == [16, 12]  # the end of the stable phase stays
    assert cli.run("snapshots", ["rewind", short, "--step", "12"]) == 0
    train_here(short, *planned)
    assert "schedule.decay_steps: 16 -> 24" in capsys.readouterr().out
    train_here(whole, *planned)
    one, other = (read(Store(f"{run}/snapshots"), 24).manifest.digest for run in (short, whole))
    assert one == other
