"""What is said when memory runs out."""

import pytest
import torch

from mingpt.errors import CRASHED, USER_ERROR
from mingpt.world.failures import classify
from mingpt.world.lifetime import Phase
from tests.kits.config_kit import configured
from tests.kits.told import Told


@pytest.mark.parametrize(
    "batch", ["micro_size=20 batch.global_size=60", "micro_size=6 batch.per_process_size=18", "micro_size=1"]
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
    failure = classify(RuntimeError(text), Phase.JOINED)
    assert (failure.code, "batch.micro_size" in failure.reason) == (USER_ERROR, True)


@pytest.mark.parametrize(("free", "code"), [(1, CRASHED), (9, USER_ERROR)])
def test_memory_that_others_hold_is_no_mistake_of_the_user(
    free: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was killed a second ago: the next attempt finds the memory free. 20 GiB, of which 10 are ours."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * 2**30, 20 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10 * 2**30)
    failure = classify(torch.OutOfMemoryError("CUDA"), Phase.JOINED)
    assert (failure.code, "8.0 GiB of this GPU" in failure.reason) == (code, code == CRASHED)
