"""What a token costs, what a device can do at its best, and the memory that a process has used."""

import os
import resource
import sys
from typing import NamedTuple

import torch

from mingpt.world import slurm
from mingpt.world.env import Env


class Gpu(NamedTuple):
    """Memory in GB; dense TFLOP/s in bf16 or fp16 on tensor cores, and in fp32. tf32 is half of the first."""

    memory: int
    half: float
    single: float

    def peak(self, precision: str) -> float:
        """Operations a second."""
        return {"fp32": self.single, "tf32": self.half / 2}.get(precision, self.half) * 1e12


# By SkyPilot's names, from NVIDIA's data sheets. CUDA's name of a GPU has the words of one of these, longer ones first.
GPUS = {
    "A10": Gpu(24, 125, 31.2),
    "A10G": Gpu(24, 70, 35),
    "A100-80GB": Gpu(80, 312, 19.5),
    "A100": Gpu(40, 312, 19.5),
    "B200": Gpu(180, 2250, 80),
    "H100-PCIe": Gpu(80, 756, 51),
    "H100": Gpu(80, 989, 67),
    "H200": Gpu(141, 989, 67),
    "L4": Gpu(24, 121, 30.3),
    "L40S": Gpu(48, 362, 91.6),
    "T4": Gpu(16, 65, 8.1),
    "V100-32GB": Gpu(32, 125, 15.7),
    "V100": Gpu(16, 125, 15.7),
}


def flops_per_token(parameters: int, layers: int, width: int, block_size: int) -> int:
    """Floating-point operations of forward and backward: 6 a parameter, and 12 LCT for attention.

    Chowdhery et al. 2022 (PaLM), appendix B.
    """
    return 6 * parameters + 12 * layers * width * block_size


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Operations a second that one process has at best: of its GPU, or of its part of those that its node shares.

    None for a CPU, and for a GPU that GPUS does not name.
    """
    if device.type != "cuda":
        return None
    words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
    known = {} if "NVL" in words else GPUS  # the NVL cards are others
    found = next((gpu for name, gpu in known.items() if words.issuperset(name.split("-"))), None)
    return found and found.peak(precision) * gpu_part()


def gpu_part() -> float:
    """The part of its GPU that a process has: 1, unless its node has fewer, which world.backend=gloo allows."""
    visible = torch.cuda.device_count()
    processes = 1 if slurm.hides_gpus(os.environ, visible) else Env.read().local_size or 1
    return min(1.0, visible / processes) if visible else 1.0


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has used: of its GPU, as torch reserves them, or of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
