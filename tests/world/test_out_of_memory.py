"""What is said, and left behind, when memory runs out."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.cuda import memory

from config_kit import configured
from mingpt.errors import CRASHED, USER_ERROR
from mingpt.world.failures import classify, leave_memory_picture
from mingpt.world.lifetime import Phase
from paths_kit import KITS, ROOT


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


@pytest.mark.parametrize(
    "text",
    [
        "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: out of memory",
    ],
)
def test_what_takes_a_gpus_memory_beside_torch_runs_out_of_it_too(text: str) -> None:
    failure = classify(RuntimeError(text), Phase.JOINED, configured())
    assert (failure.code, failure.reason[:33]) == (USER_ERROR, "out of memory in the first step: ")
    assert classify(OSError(text), Phase.JOINED, configured()).code == CRASHED  # another's


def test_a_gpus_memory_is_left_below_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stand-in for torch's function: there is no GPU here."""
    monkeypatch.setattr(memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"torch's pickle"))
    said = leave_memory_picture(str(tmp_path / "run"))
    [left] = (tmp_path / "run/memory").iterdir()
    assert left.read_bytes() == b"torch's pickle"
    assert f"run.dir/memory/{left.name}, for https://pytorch.org/memory_viz" in said
    (tmp_path / "file").touch()
    assert "could not be written" in leave_memory_picture(str(tmp_path / "file"))


REPORT = """
import sys, time, torch
from pathlib import Path
from torch.cuda import memory
from config_kit import configured
from mingpt.train import attempt
from mingpt.world import entry
from mingpt.world.lifetime import Lifetime
memory._dump_snapshot = lambda name: Path(name).write_bytes(b"torch's pickle")
attempt.PICTURE_SECONDS = 2
config = configured("run.dir=s3://bucket/run")
program = lambda _, lifetime: attempt.report_failure(torch.OutOfMemoryError("CUDA"), lifetime, config)
entry.run(lambda: program, Lifetime(), worker=False)
"""


def test_a_bucket_that_does_not_answer_hides_no_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        variables = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "PYTHONPATH": f"{KITS}:{ROOT}",
        }
        command = [sys.executable, "-c", REPORT]
        ended = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600)
    assert ended.returncode == USER_ERROR, ended.stderr
    reason, picture = ended.stderr.splitlines()[-2:]
    assert reason.startswith("error: out of memory in the first step: lower batch.micro_size")
    assert picture == "what lies in the GPU's memory could not be written within 2 s"
