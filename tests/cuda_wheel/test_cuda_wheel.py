"""What the GPU's host does in a step, seen without a GPU: torch's CUDA wheel on fake tensors (`make test-cuda-wheel`).

Bits, times, streams and NCCL itself are not seen here.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

HERE = Path(__file__).parent
SMALL = (
    "model.n_layer=2", "model.n_head=4", "model.n_embd=256", "model.block_size=128", "data.vocabulary=512",
    "batch.global_size=32", "batch.micro_size=2",  # 16 microbatches
)  # fmt: skip


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what stands in for the driver."""
    to = tmp_path_factory.mktemp("driver")
    packages = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages")
    includes = [packages / "nvidia/cu13/include", packages / "triton/backends/nvidia/include"]
    gcc = ["gcc", "-shared", "-fPIC", *(f"-I{path}" for path in includes), str(HERE / "driver.c"), "-o"]
    subprocess.run([*gcc, to / "preload.so"], check=True)
    subprocess.run([*gcc, to / "libcuda.so.1", "-DDRIVER", "-Wl,-soname,libcuda.so.1"], check=True)
    return to


def steps(driver: Path, *overrides: str, ranks: Sequence[int], size: int, each: int) -> Any:
    """What these ranks have done. size: of the world; each: processes on each node."""
    environment = {
        **os.environ, "LD_PRELOAD": str(driver / "preload.so"), "LD_LIBRARY_PATH": str(driver),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, str(HERE / "fake_steps.py"), json.dumps([overrides, [*ranks], size, each])]
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


@pytest.mark.parametrize(
    "overrides",
    [
        "model=gpt2 precision=bf16",
        "model=gpt2 precision=bf16 train.cuda_graphs=true",
        "model=gpt2 precision=fp16 optimizer.ema=0.99",
        "model=modern precision=bf16 optimizer=muon health.spike_sigma=6",
        "model=modern precision=fp32 train.recompute=block train.loss_rows=64",
        "model=gpt2 precision=bf16 reduce=fast",
    ],
)
def test_a_step_never_waits_and_all_ranks_send_the_same(driver: Path, overrides: str) -> None:
    for size, each in [(1, 1), (3, 3), (4, 2)]:
        ranks = steps(driver, *overrides.split(), *SMALL, ranks=range(size), size=size, each=each)
        for rank in ranks:
            assert rank["waits"] == rank["mixed"] == []
            assert [name for name, _ in rank["collectives"]] == [name for name, _ in ranks[0]["collectives"]]
        assert bool(ranks[0]["collectives"]) == (size > 1 or "reduce=fast" in overrides)


@pytest.mark.parametrize(
    ("experiment", "size", "each"),
    [
        ("gpt2_124m ~data.stride", 16, 4),
        ("shakespeare_10m model.dropout=0", 1, 1),
        ("shakespeare_10m model.dropout=0 train.cuda_graphs=true", 1, 1),
        ("gpt2_124m ~data.stride train.cuda_graphs=true", 16, 4),
        ("shakespeare_char", 4, 2),
        ("shakespeare_gpt2", 4, 2),
    ],
)
def test_the_plan_knows_the_memory_of_a_step(driver: Path, experiment: str, size: int, each: int) -> None:
    """Of bf16 and fp32, of AdamW and Muon. The plan's constant, for CUDA's own, is left out.

    The plan looks at a CPU's attention, which keeps more for backward if there is dropout.
    """
    [found] = steps(driver, *f"experiment={experiment}".split(), ranks=[size // 3], size=size, each=each)
    assert found["peak"] == pytest.approx(found["planned"], rel=0.01)
    assert found["waits"] == found["mixed"] == []
