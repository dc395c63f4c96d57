"""Documents apart: attention does not cross from one document to the next within a sample.

The end of a text begins the document that follows it in its sample: the first token is then predicted from it alone, as
when generation starts with it. Each target still counts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mingpt.data.source import EvalSplit, Microbatch, Samples


def apart(batch: Microbatch, end_of_text: int) -> Microbatch:
    """(tokens, targets, weights, documents): with the number of each token's document, int64, from 0 in each sample."""
    tokens, targets = batch
    documents: Tensor = (tokens == end_of_text).cumsum(1)
    return tokens, targets, torch.ones(tokens.shape), documents


class SamplesApart(Samples):
    def __init__(self, samples: Samples, end_of_text: int) -> None:
        self.samples, self.end_of_text = samples, end_of_text

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, ids: Sequence[int]) -> Microbatch:
        return apart(self.samples[ids], self.end_of_text)


class EvalApart:
    def __init__(self, split: EvalSplit, end_of_text: int) -> None:
        self.split, self.end_of_text = split, end_of_text

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int, /) -> Microbatch:
        return apart(self.split[index], self.end_of_text)
