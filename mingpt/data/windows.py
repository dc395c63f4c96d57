"""How samples are cut: windows of one long sequence of tokens for training, consecutive chunks for evaluation.

With documents apart, attention does not cross from one document to the next within a sample. The end of a text begins
the document that follows it in its sample: the first token is then predicted from it alone, as when generation starts
with it. Each target still counts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingpt.data.source import Microbatch, SampledSplit, Samples
from mingpt.errors import UserError
from mingpt.model.language import IGNORE


class Tokens(Protocol):
    """A long sequence of tokens. Small when pickled; each loader process opens its files anew."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """The tokens [start, stop), of any integer type; 0 <= start <= stop <= len(self)."""


class TokenFile:
    """A memory-mapped .npy file, whose pages the processes of a node share. A pickled copy holds the path alone."""

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
    """Samples of block_size tokens from the split [start, stop); sample i begins at start + i * stride."""

    def __init__(self, tokens: Tokens, start: int, stop: int, block_size: int, stride: int) -> None:
        self.tokens, self.start, self.stop, self.block_size, self.stride = tokens, start, stop, block_size, stride

    def __len__(self) -> int:
        """The number of samples that lie in the split with their last target: block_size + 1 tokens each."""
        return max(0, (self.stop - self.start - self.block_size - 1) // self.stride + 1)

    def __getitem__(self, ids: Sequence[int]) -> Microbatch:
        """(tokens, targets), each (len(ids), block_size) int64."""
        rows = np.empty((len(ids), self.block_size + 1), dtype=np.int64)
        for row, i in zip(rows, ids, strict=True):
            start = self.start + i * self.stride
            row[:] = self.tokens.read(start, start + self.block_size + 1)
        both = torch.from_numpy(rows)
        return both[:, :-1], both[:, 1:]


def training_windows(tokens: Tokens, stop: int, block_size: int, stride: int, shown: str) -> WindowDataset:
    """The samples of the first `stop` tokens. Raises UserError if there is none. shown: where the tokens are."""
    windows = WindowDataset(tokens, 0, stop, block_size, stride)
    if not len(windows):
        raise UserError(
            f"model.block_size={block_size} is longer than the data: {shown} has {stop} training tokens, and a sample "
            f"takes {block_size + 1}: lower model.block_size or take more text"
        )
    return windows


class EvalChunks(Samples):
    """The split [start, stop) as consecutive chunks of block_size: each target once, IGNORE after the last one."""

    def __init__(self, tokens: Tokens, start: int, stop: int, block_size: int) -> None:
        self.tokens, self.start, self.stop, self.block_size = tokens, start, stop, block_size

    def __len__(self) -> int:
        """The number of chunks."""
        return -(-max(0, self.stop - self.start - 1) // self.block_size)

    def __getitem__(self, ids: Sequence[int]) -> Microbatch:
        """(tokens, targets), each (len(ids), block_size) int64."""
        tokens = torch.zeros(len(ids), self.block_size, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORE)
        for row, i in enumerate(ids):
            start = self.start + i * self.block_size
            run = self.tokens.read(start, min(start + self.block_size + 1, self.stop)).astype(np.int64)
            tokens[row, : len(run) - 1] = torch.from_numpy(run[:-1])
            targets[row, : len(run) - 1] = torch.from_numpy(run[1:])
        return tokens, targets


def apart(batch: Microbatch, end_of_text: int) -> Microbatch:
    """(tokens, targets, weights, documents): with the number of each token's document, int64, from 0 in each sample."""
    tokens, targets = batch
    documents: Tensor = (tokens == end_of_text).cumsum(1)
    return tokens, targets, torch.ones(tokens.shape), documents


class Apart(Samples):
    """The samples of a training set, or of a split for evaluation, with their documents apart."""

    def __init__(self, joined: Samples, end_of_text: int) -> None:
        self.joined, self.end_of_text = joined, end_of_text

    def __len__(self) -> int:
        return len(self.joined)

    def __getitem__(self, ids: Sequence[int]) -> Microbatch:
        return apart(self.joined[ids], self.end_of_text)


class PaddedBatches(SampledSplit):
    """All microbatches have one shape: samples whose targets are IGNORE fill up the last one."""

    def __getitem__(self, index: int, /) -> Microbatch:
        start, last = index * self.micro_size, self.size - 1
        wanted = range(start, start + self.micro_size)
        tokens, targets, *weights = self.samples[[self.chosen[min(i, last)] for i in wanted]]
        beyond = torch.tensor([i > last for i in wanted])
        return tokens, targets.masked_fill(beyond[:, None], IGNORE), *weights
