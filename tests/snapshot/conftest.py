"""What several files of this room try on both kinds of place; the others have a store of their own."""

from pathlib import Path
from uuid import uuid4

import pytest

from mingpt.snapshot.store import Store


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store(str(tmp_path / "snapshots") if request.param == "local" else f"memory://{uuid4().hex}/snapshots")
