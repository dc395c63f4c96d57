"""A run with bad steps, trained in the test's own process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from poison_kit import POISONED


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Trains in tmp_path/run with these overrides; returns the exit code."""
    monkeypatch.setattr("mingpt.world.joining._exit_after", lambda seconds, code: None)
    threads = torch.get_num_threads()
    yield lambda *overrides: attempt([*POISONED, f"run.dir={tmp_path}/run", *overrides], Lifetime())
    torch.set_num_threads(threads)
