"""Documents apart: attention does not cross from one document to the next within a sample.

The end of a text begins the document that follows it in its sample: the first token is then predicted from it alone, as
when generation starts with it. Each target still counts.
"""

from typing import Any

import torch
from torch import Tensor

from mingpt.data.source import EvalSplit, Microbatch, Samples


def apart(batch: Microbatch, end_of_text: int) -> Microbatch:
    """(tokens, targets, weights, documents): with the number of each token's document, int64, from 0 in each sample."""
    tokens, targets = batch
    documents: Tensor = (tokens == end_of_text).cumsum(1)
    return tokens, targets, torch.ones(tokens.shape), documents


class Apart(Samples):
    """The microbatches of a training set, or of a split for evaluation, with their documents apart."""

    def __init__(self, joined: Samples | EvalSplit, end_of_text: int) -> None:
        self.joined, self.end_of_text = joined, end_of_text

    def __len__(self) -> int:
        return len(self.joined)

    def __getitem__(self, which: Any, /) -> Microbatch:
        return apart(self.joined[which], self.end_of_text)
