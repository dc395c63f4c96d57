"""This process's microbatches, read by torch's DataLoader in `data.workers` processes, or in this one if that is 0."""

import faulthandler
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from errno import ENOSPC
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mingpt.compute.batches import RankSampler
from mingpt.data.source import Samples
from mingpt.errors import TransientError, UserError
from mingpt.world.hangreport import DUMP_SIGNAL
from mingpt.world.lifetime import children_ignore_signals, end_with_parent
from mingpt.world.world import Progress

DYING_SECONDS = 10.0  # between the end of a process's connections and its own, on a busy machine


def _begin(_worker: int) -> None:
    """Runs in each loader process: end with the trainer, however that dies; show the watchdog where it is."""
    if sys.stderr is not None:
        faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    end_with_parent(parent.pid)


class _ErrorsAsItems(Samples):
    """Returns UserError and TransientError as items, for `_raised`: torch would turn them into stack traces.

    workers: if there are any, items are put into shared memory here. torch does so in a thread, whose errors nobody
    sees: the trainer would wait for the item until its limit.
    """

    def __init__(self, samples: Samples, workers: int) -> None:
        self.samples, self.workers = samples, workers

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, ids: Sequence[int]) -> Any:
        try:
            item = self.samples[ids]
            return tuple(tensor.share_memory_() for tensor in item) if self.workers else item
        except (UserError, TransientError) as error:
            return error
        except RuntimeError as error:
            if self.workers and os.strerror(ENOSPC) in str(error):
                return _too_small(self.workers)
            raise


def _too_small(workers: int) -> UserError:
    return UserError(
        f"/dev/shm is full, the shared memory in which data.workers={workers} hand over microbatches: give it more "
        "room (docker run --shm-size=8g; Kubernetes: an emptyDir of medium Memory), or set data.workers=0"
    )


def _require_alive(processes: Sequence[BaseProcess], seconds: float = 0.0) -> None:
    """Raises RuntimeError with torch's words if one of these processes has ended, or begins to in so many seconds."""
    for ended in wait([process.sentinel for process in processes], seconds):
        dead = next(process for process in processes if process.sentinel == ended)
        dead.join(DYING_SECONDS)  # torch's error comes with its SIGCHLD: here, and not in what handles ours
        raise RuntimeError(f"DataLoader worker (pid {dead.pid}) has ended: exit code {dead.exitcode}")


def _raised(loader: Iterator[Any], processes: Sequence[BaseProcess]) -> Iterator[Sequence[Tensor]]:
    """The items of `loader`, which these processes read."""
    while True:
        # If one dies, torch raises an error wherever this thread is: what an observer or a snapshot raises is caught.
        _require_alive(processes)
        try:
            item = next(loader)
        except StopIteration:
            return
        except (OSError, EOFError) as error:  # a connection, which a dying process closes before it counts as dead
            if processes and "in DataLoader worker process" not in str(error):  # not what reading the data has raised
                _require_alive(processes, DYING_SECONDS)
            raise
        if isinstance(item, Exception):
            raise item
        Progress.microbatches += 1
        yield item


def load(
    samples: Samples, work: RankSampler, workers: int, limit_seconds: float, device: torch.device
) -> Iterator[Sequence[Tensor]]:
    """The microbatches whose sample numbers `work` yields, in its order.

    limit_seconds: the longest wait for a loader process. Raises UserError or TransientError where reading one does, and
    RuntimeError if a loader process dies.
    """
    loader = DataLoader(
        _ErrorsAsItems(samples, workers),
        batch_size=None,  # each item of the sampler is a whole microbatch
        sampler=work,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        # Spawned, not forked: fsspec's threads do not survive a fork.
        multiprocessing_context="spawn" if workers else None,
        worker_init_fn=_begin if workers else None,
        timeout=limit_seconds if workers else 0,
        generator=torch.Generator(),  # without it torch draws the workers' seeds from the global generator
    )
    # Ctrl-C and schedulers signal the whole process group. A loader process that died of it would turn the requested
    # stop into a crash (lightning#20542).
    with children_ignore_signals() if workers else nullcontext():
        others = set(multiprocessing.active_children())
        try:
            batches = iter(loader)
        except OSError as error:  # of a semaphore
            raise (_too_small(workers) if error.errno == ENOSPC else error) from error
    processes = [child for child in multiprocessing.active_children() if child not in others]
    if len(processes) < workers:  # torch learns of deaths from here on only
        raise RuntimeError("DataLoader worker (pid unknown) has ended before the last one had started")
    return _raised(batches, processes)
