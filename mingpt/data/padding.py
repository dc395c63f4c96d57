"""A split of separate samples as microbatches of one shape, for evaluation."""

import torch

from mingpt.data.source import Microbatch, Samples
from mingpt.model.language import IGNORE


class PaddedBatches:
    """Each sample once, in order; samples whose targets are IGNORE fill up the last microbatch."""

    def __init__(self, samples: Samples, micro_size: int) -> None:
        self.samples, self.micro_size = samples, micro_size

    def __len__(self) -> int:
        """The number of microbatches."""
        return -(-len(self.samples) // self.micro_size)

    def __getitem__(self, index: int, /) -> Microbatch:
        start, last = index * self.micro_size, len(self.samples) - 1
        wanted = range(start, start + self.micro_size)
        tokens, targets, *weights = self.samples[[min(i, last) for i in wanted]]
        beyond = torch.tensor([i > last for i in wanted])
        return tokens, targets.masked_fill(beyond[:, None], IGNORE), *weights
