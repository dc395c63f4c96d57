"""This process's microbatches, loaded by processes of their own where `data.workers` says so."""

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mingpt.batches import Share
from mingpt.data.source import Samples
from mingpt.lifetime import children_ignore_signals, end_with_parent


def _begin(_worker: int) -> None:
    """A loader process does not outlive its trainer."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    end_with_parent(parent.pid)


def load(
    samples: Samples, work: Share, workers: int, limit_seconds: float, device: torch.device
) -> Iterator[Sequence[Tensor]]:
    """The microbatches of `work`, one after the other from the first step to the last."""
    loader = DataLoader(
        samples,
        batch_size=None,  # each item of the sampler is a whole microbatch
        sampler=work,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        # spawned, since fsspec's threads do not survive a fork
        multiprocessing_context="spawn" if workers else None,
        worker_init_fn=_begin if workers else None,
        timeout=limit_seconds if workers else 0,
        generator=torch.Generator(),  # else torch draws the workers' seeds from the global generator
    )
    # A signal goes to the whole process group: loader processes that died of it would turn a stop into a crash
    # (lightning#20542).
    with children_ignore_signals() if workers else nullcontext():
        return iter(loader)
