from pathlib import Path

import pytest

from mingpt.snapshot.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """On a disk. What holds for all kinds of stores: tests/stores."""
    return Store(str(tmp_path / "snapshots"))
