"""Samples cut out of one long row of tokens: overlapping windows to train on, consecutive pieces to validate on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mingpt.data.source import Microbatch, Samples
from mingpt.model.gpt2 import IGNORE


class Tokens(Protocol):
    """A long row of tokens, wherever it lies. Small when pickled; opened anew in each loader process."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """The tokens from start to stop (both within the row), of any integer type."""


class TokenFile:
    """A .npy file, memory-mapped: only the path travels, the pages are shared by all processes of the node."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: NDArray[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": None}

    @property
    def mapped(self) -> NDArray[Any]:
        if self._mapped is None:
            self._mapped = np.load(self.path, mmap_mode="r")
        return self._mapped

    def __len__(self) -> int:
        return len(self.mapped)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        return self.mapped[start:stop]


class WindowDataset(Samples):
    """Samples of a fixed length from a split [start, stop) of a row; sample i starts at start + i * stride."""

    def __init__(self, tokens: Tokens, start: int, stop: int, block_size: int, stride: int) -> None:
        self.tokens, self.start, self.stop, self.block_size, self.stride = tokens, start, stop, block_size, stride

    def __len__(self) -> int:
        """Samples that are whole: block_size tokens and the one after."""
        return max(0, (self.stop - self.start - self.block_size - 1) // self.stride + 1)

    def __getitem__(self, ids: Sequence[int]) -> Microbatch:
        """(tokens, targets), each (len(ids), block_size) int64."""
        rows = np.empty((len(ids), self.block_size + 1), dtype=np.int64)
        for row, i in zip(rows, ids, strict=True):
            start = self.start + i * self.stride
            row[:] = self.tokens.read(start, start + self.block_size + 1)
        both = torch.from_numpy(rows)
        return both[:, :-1], both[:, 1:]


class EvalChunks:
    """A whole split as consecutive pieces of block_size, each target once; the last ones filled up with IGNORE."""

    def __init__(self, tokens: Tokens, start: int, stop: int, block_size: int, micro_size: int) -> None:
        self.tokens, self.start, self.stop = tokens, start, stop
        self.shape = (micro_size, block_size)
        self.targets = max(0, stop - start - 1)
        self.microbatches = -(-self.targets // (block_size * micro_size))

    def __len__(self) -> int:
        """Microbatches of a split."""
        return self.microbatches

    def __getitem__(self, index: int, /) -> Microbatch:
        """(tokens, targets) of one microbatch, each (micro_size, block_size) int64."""
        size = self.shape[0] * self.shape[1]
        start = self.start + index * size
        run = self.tokens.read(start, min(start + size + 1, self.stop)).astype(np.int64)
        tokens = torch.zeros(size, dtype=torch.int64)
        targets = torch.full((size,), IGNORE, dtype=torch.int64)
        tokens[: len(run) - 1] = torch.from_numpy(run[:-1])
        targets[: len(run) - 1] = torch.from_numpy(run[1:])
        return tokens.view(self.shape), targets.view(self.shape)
