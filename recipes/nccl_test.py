"""All-reduce over all processes that torchrun has started: sizes, times, GB/s; on GPUs by NCCL, else by gloo.

    torchrun --nproc-per-node=8 recipes/nccl_test.py

`busbw` is what nccl-tests calls so: bytes that leave a GPU in a second, to be held against what the network can do.
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

ROUNDS = 5


def seconds(tensor: torch.Tensor) -> float:
    """Of one all-reduce: the best of some, after one that opens the connections."""
    best = float("inf")
    for _ in range(ROUNDS + 1):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(minutes=2))
    world, largest = dist.get_world_size(), 1 << 30 if gpu else 1 << 24
    size = 1 << 20
    while size <= largest:
        took = seconds(torch.ones(size // 4, device=device))
        if dist.get_rank() == 0:
            rate = size / took / 1e9 * 2 * (world - 1) / world
            print(f"{size >> 20:5} MiB  {took * 1e3:9.2f} ms  busbw {rate:7.2f} GB/s", flush=True)
        size *= 4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
