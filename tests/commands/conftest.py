"""Runs for verbs, each to be changed and in the current folder, so that a command line names it as a user does."""

import shutil
from pathlib import Path

import pytest

from tests.kits.snapshot_kit import save
from tests.kits.verb_kit import store


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def base(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run of twelve steps."""
    return shutil.copytree(trained, tmp_path / "base")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 4 (the best), 10, 20 and 30, and what a writer of step 25 left when it was killed; of no training."""
    for step in (4, 10, 20, 25, 30):
        save(store(), step, val_loss=step / 2)
    Path(store().folder(25), "manifest.json").unlink()
    return tmp_path / "run"
