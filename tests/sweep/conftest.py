from pathlib import Path

import pytest

from sweep_kit import Sweeps


@pytest.fixture
def sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweeps:
    return Sweeps(tmp_path, monkeypatch)
