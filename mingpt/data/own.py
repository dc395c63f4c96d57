"""Data of one's own: `data._target_` names a function that returns a Source.

Where the data are tensors in memory, `source_of` makes the Source.
"""

from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor

from mingpt.config import plugin
from mingpt.config.datasets import OwnData
from mingpt.data.source import Microbatch, SampledSplit, Samples, Source, Vocabulary
from mingpt.data.vocabulary import NoTokens
from mingpt.errors import UserError

NOTHING = NoTokens()


class Rows(Samples):
    """Samples of tensors in memory: each is one row of each tensor."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, ids: Sequence[int]) -> Microbatch:
        return tuple(t[list(ids)] for t in self.tensors)


def source_of(
    train: Sequence[Tensor], validation: Sequence[Tensor], micro_size: int, vocabulary: Vocabulary = NOTHING
) -> Source:
    """A Source of tensors in memory, in the order of the arguments of the module's forward.

    train: tensors with one row for each sample. validation: as many tensors; with no rows, nothing is evaluated.
    micro_size: batch.micro_size.
    Raises UserError if the numbers of tensors or rows differ.
    """
    for name, tensors in (("train", train), ("validation", validation)):
        if len(tensors) != len(train) or not tensors or len({len(t) for t in tensors}) != 1:
            raise UserError(f"{name} must be tensors with the same number of rows each, as many tensors in both splits")
    content = sha256()
    for t in (*train, *validation):
        content.update(f"{t.dtype} {list(t.shape)}\n".encode())
        content.update(t.contiguous().flatten().view(torch.uint8).numpy().data if t.numel() else b"")
    return Source(Rows(*train), SampledSplit(Rows(*validation), micro_size), vocabulary, content.hexdigest())


def open_own(config: OwnData, block_size: int, micro_size: int) -> Source:
    """Call the target. Raises UserError if it returns no Source that the trainer can read."""
    shown = f"data._target_={config.target}"
    source = plugin.call("data", config, block_size=block_size, micro_size=micro_size)
    if not isinstance(source, Source):
        raise UserError(
            f"{shown} returns a {type(source).__name__}: return a mingpt.data.source.Source, as source_of does"
        )
    if len(source.train) == 0:
        raise UserError(f"{shown}: the training set has no samples")
    try:
        one = source.train[[0]]
    except (Exception, SystemExit) as error:
        raise UserError(f"{shown}: train[[0]] failed: {type(error).__name__}: {error}") from error
    if not isinstance(one, tuple) or not all(isinstance(x, Tensor) and x.shape[:1] == (1,) for x in one):
        raise UserError(f"{shown}: train[[0]] must be a tuple of tensors with one row each")
    return source
