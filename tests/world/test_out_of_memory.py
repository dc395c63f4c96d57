"""What is said, and left behind, when memory runs out."""

from pathlib import Path

import pytest
import torch
from torch.cuda import memory

from config_kit import configured
from mingpt.world.failures import classify, leave_memory_picture
from mingpt.world.lifetime import Phase


@pytest.mark.parametrize(
    ("batch", "cure"),
    [
        (("batch.micro_size=16",), "lower batch.micro_size from 16 to 8 (a snapshot then needs resume.changed=true), "),
        (("batch.micro_size=20", "batch.global_size=60"), "lower batch.micro_size from 20 to 15 "),
        (("batch.micro_size=6", "batch.per_process_size=18"), "lower batch.micro_size from 6 to 3 "),
        (("batch.micro_size=1",), "lower batch.micro_size, model.block_size or"),
    ],
)
def test_out_of_memory_says_what_to_lower_and_by_how_much(batch: tuple[str, ...], cure: str) -> None:
    failure = classify(torch.OutOfMemoryError("CUDA"), Phase.JOINED, configured(*batch))
    assert failure.reason.startswith(f"out of memory in the first step: {cure}")


def test_a_gpus_memory_is_left_below_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for torch's function: there is no GPU here."""
    monkeypatch.setattr(memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"torch's pickle"))
    said = leave_memory_picture(str(tmp_path / "run"))
    [left] = (tmp_path / "run/memory").iterdir()
    assert left.read_bytes() == b"torch's pickle"
    assert f"run.dir/memory/{left.name}, for https://pytorch.org/memory_viz" in said
    (tmp_path / "file").touch()
    assert "could not be written" in leave_memory_picture(str(tmp_path / "file"))
