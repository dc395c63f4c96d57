"""This process's microbatches, loaded by processes of their own where `data.workers` says so."""

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mingpt.compute.batches import RankSampler
from mingpt.data.source import Samples
from mingpt.errors import TransientError, UserError
from mingpt.world.lifetime import children_ignore_signals, end_with_parent


def _begin(_worker: int) -> None:
    """A loader process does not outlive its trainer."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    end_with_parent(parent.pid)


class _Told(Samples):
    """Gives what the user must know as a value: torch would hand on a loader process's error as a stack trace."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, ids: Sequence[int]) -> Any:
        try:
            return self.samples[ids]
        except (UserError, TransientError) as error:
            return error


def _raised(loader: Iterator[Any]) -> Iterator[Sequence[Tensor]]:
    for item in loader:
        if isinstance(item, Exception):
            raise item
        yield item


def load(
    samples: Samples, work: RankSampler, workers: int, limit_seconds: float, device: torch.device
) -> Iterator[Sequence[Tensor]]:
    """The microbatches of `work`, one after the other from the first step to the last."""
    loader = DataLoader(
        _Told(samples),
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
        return _raised(iter(loader))
