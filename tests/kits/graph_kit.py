"""A stand-in for a CUDA graph on a CPU: it records the operations of a microbatch, and replays those, not the Python.

As in a real one, everything has a fixed address, what the host computed while it recorded is a constant, and to wait
for the device is an error. Before each replay all that it writes is poisoned, so that nothing of the one before is
left to be used.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mingpt.train import graphs

WAIT = torch.ops.aten._local_scalar_dense.default
COPY = torch.ops.aten._foreach_copy_.default


def tensors(tree: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def storages(tree: Any) -> set[int]:
    """Name the memory of all tensors in there; views of one memory have one name."""
    return {x.untyped_storage()._cdata for x in tensors(tree)}


class Operations(TorchDispatchMode):
    """Those that run under it, with what they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded = list[tuple[Any, Any, Any, Any]]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is WAIT:
            raise RuntimeError("called a synchronizing operation")
        out = function(*args, **(kwargs or {}))
        # Aliases of the same memory, without what autograd knows of the tensors.
        self.recorded.append(
            tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (function, args, kwargs, out))
        )
        return out


class Recorded:
    """For RECORDERS. replays: how many there were in this process, those that check a capture among them."""

    replays = 0

    def __init__(self, device: torch.device) -> None:
        self.operations = list[tuple[Any, Any, Any, Any]]()

    def warm_up(self, work: Callable[[], None]) -> int:
        work()
        with Operations():
            work()
        return 1000

    def free(self) -> float:
        return math.inf

    def capture(self, work: Callable[[], None]) -> None:
        with Operations() as mode:
            work()
        self.operations = mode.recorded

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    @torch.no_grad()
    def replay(self) -> None:
        type(self).replays += 1
        self.poison()
        for function, args, kwargs, out in self.operations:
            again = function(*args, **(kwargs or {}))
            for old, new in zip(tensors(out), tensors(again), strict=True):
                if (
                    old.untyped_storage()._cdata != new.untyped_storage()._cdata
                ):  # otherwise a view, or written in place
                    old.copy_(new)

    def poison(self) -> None:
        for function, args, _, out in self.operations:
            written = args[0] if function is COPY else [x for x in tensors(out) if not storages([x]) & storages(args)]
            for tensor in written:
                tensor.fill_(math.nan if tensor.is_floating_point() else 77)


class Refused(Recorded):
    """A device that captures nothing."""

    def capture(self, work: Callable[[], None]) -> None:
        with Operations():
            work()
        raise RuntimeError("operation not permitted when stream is capturing")


@contextmanager
def graphs_on_cpu(recorder: type[Recorded] = Recorded, except_rank: int | None = None) -> Iterator[type[Recorded]]:
    """Microbatches on a CPU are replays, unless train.cuda_graphs=false. except_rank: this one captures nothing."""
    mine = Refused if os.environ.get("RANK", "0") == str(except_rank) else recorder
    mine.replays = 0
    with patch.dict(graphs.RECORDERS, {"cpu": mine}):
        yield mine
