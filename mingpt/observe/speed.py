"""How fast a machine could be: what a token costs, and what a device can do at its best."""

import time

import torch

# Dense TFLOP/s by the name that CUDA gives, from NVIDIA's data sheets: bf16 or fp16 tensor cores, and fp32.
# With tf32 the same tensor cores do half as much.
PEAKS = {
    "B200": (2250, 80),
    "H200": (989, 67),
    "H100 PCIe": (756, 51),
    "H100": (989, 67),
    "A100": (312, 19.5),
    "L40S": (362, 91.6),
    "L4": (121, 30.3),
    "A10G": (70, 35),
    "V100": (125, 15.7),
    "T4": (65, 8.1),
}
SIZE, REPEATS = 512, 8  # of the matmul that is measured on a CPU: some 50 ms


def flops_per_token(parameters: int, layers: int, width: int, block_size: int) -> int:
    """Floating-point operations of forward and backward: 6 a parameter, and 12 LCT for attention.

    Chowdhery et al. 2022 (PaLM), appendix B.
    """
    return 6 * parameters + 12 * layers * width * block_size


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Operations a second of one process's device at best; None for a GPU that PEAKS does not name.

    A CPU's is measured: the best of REPEATS float32 products with the threads that training uses.
    """
    if device.type == "cuda":
        words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
        known = {} if "NVL" in words else PEAKS  # the NVL cards are others
        found = next((peak for name, peak in known.items() if words.issuperset(name.split())), None)
        if found is None:
            return None
        return {"fp32": found[1], "tf32": found[0] / 2}.get(precision, found[0]) * 1e12
    a = torch.ones(SIZE, SIZE)  # not random: training's random numbers stay as they are
    return max(2 * SIZE**3 / _seconds(a) for _ in range(REPEATS))


def _seconds(a: torch.Tensor) -> float:
    began = time.perf_counter()
    a @ a
    return time.perf_counter() - began
