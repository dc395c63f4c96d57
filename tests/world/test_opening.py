"""A process's device is opened in a thread meanwhile: only where there is a GPU, and its failure is told once."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mingpt.config.schema import WorldConfig
from mingpt.errors import CRASHED
from mingpt.train.attempt import attempt
from mingpt.world.joining import Opening
from mingpt.world.lifetime import Lifetime
from tests.kits.run_kit import TINY


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """torch counts a GPU, and has no code for one, so opening it fails, once this event is set."""
    may = threading.Event()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: may.wait(60))
    yield may
    may.set()


@pytest.mark.parametrize(("device", "visible"), [("cpu", 1), ("auto", 0)])
def test_without_a_gpu_there_is_no_thread(device: str, visible: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    before = threading.active_count()
    opening = Opening(WorldConfig(device=device), 0)  # type: ignore[arg-type]
    assert threading.active_count() == before
    assert opening.device() == torch.device("cpu")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_is_raised_where_the_device_is_used_and_only_there(
    gpu: threading.Event, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    opening = Opening(WorldConfig(device="cuda"), 0)
    gpu.set()
    with pytest.raises(AssertionError, match="CUDA"):
        opening.device()
    words = [*TINY, "data=random", "world.device=cuda", f"run.dir={tmp_path}/run"]
    capsys.readouterr()
    assert attempt(words, Lifetime()) == CRASHED
    said = capsys.readouterr()
    assert (said.out + said.err).count("error: AssertionError: ") == 1
    assert not (tmp_path / "run").exists()


def test_a_gpu_that_does_not_answer_is_told(gpu: threading.Event) -> None:
    opening = Opening(WorldConfig(device="auto", init_timeout_seconds=0.01), 0)
    with pytest.raises(TimeoutError, match=r"world\.init_timeout_seconds"):
        opening.device()
