"""What is said, and left behind, when memory runs out."""

import threading
from pathlib import Path

import pytest
import torch
from torch.cuda import memory

from config_kit import configured
from mingpt.errors import CRASHED, USER_ERROR
from mingpt.train import attempt
from mingpt.world.failures import classify, leave_memory_picture
from mingpt.world.lifetime import Lifetime, Phase
from told import Told


@pytest.mark.parametrize(
    "batch",
    ["micro_size=16", "micro_size=20 batch.global_size=60", "micro_size=6 batch.per_process_size=18", "micro_size=1"],
)
def test_out_of_memory_says_what_to_lower_and_by_how_much(batch: str, told: Told) -> None:
    told(classify(torch.OutOfMemoryError("CUDA"), Phase.JOINED, configured(*f"batch.{batch}".split())).reason)


@pytest.mark.parametrize(
    "text",
    [
        "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: out of memory",
        "DefaultCPUAllocator: can't allocate memory: you tried to",
    ],
)
def test_what_takes_a_gpus_memory_beside_torch_runs_out_of_it_too(text: str) -> None:
    failure = classify(RuntimeError(text), Phase.JOINED, configured())
    assert (failure.code, "batch.micro_size" in failure.reason) == (USER_ERROR, True)


@pytest.mark.parametrize(("free", "code"), [(1, CRASHED), (9, USER_ERROR)])
def test_memory_that_others_hold_is_no_mistake_of_the_user(
    free: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed a second ago: the next attempt finds the memory free. 20 GiB, of which 10 are ours."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * 2**30, 20 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10 * 2**30)
    failure = classify(torch.OutOfMemoryError("CUDA"), Phase.JOINED, configured())
    assert (failure.code, "8.0 GiB of this GPU" in failure.reason) == (code, code == CRASHED)


def test_a_gpus_memory_is_left_below_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for torch's function: there is no GPU here."""
    monkeypatch.setattr(memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"torch's pickle"))
    said = leave_memory_picture(str(tmp_path / "run"))
    [left] = (tmp_path / "run/memory").iterdir()
    assert left.read_bytes() == b"torch's pickle"
    assert f"run.dir/memory/{left.name}, for https://pytorch.org/memory_viz" in said
    (tmp_path / "file").touch()
    assert "could not be written" in leave_memory_picture(str(tmp_path / "file"))


def test_a_bucket_that_does_not_answer_hides_no_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(attempt, "PICTURE_SECONDS", 0.1)
    monkeypatch.setattr(attempt, "leave_memory_picture", lambda run_dir: answered.wait(600))
    assert attempt.report_failure(torch.OutOfMemoryError("CUDA"), Lifetime(), configured()) == USER_ERROR
    answered.set()
    reason, picture = capsys.readouterr().err.splitlines()
    assert "batch.micro_size" in reason
    assert "0.1 s" in picture
