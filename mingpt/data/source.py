"""Where tokens come from, as the trainer sees it: one form for all kinds of data, which opening.py tells apart.

A microbatch is (tokens, targets) or (tokens, targets, weights): tensors of one shape each, int64, int64 and float32,
which the model takes as they are. A target of model.IGNORE does not count; a weight is how much a target counts.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.utils.data import Dataset

from mingpt.data.vocabulary import Vocabulary

Microbatch = tuple[Tensor, ...]


class Samples(Dataset[Microbatch]):
    """The training set. It travels to loader processes, so it is small when pickled and opens its files there."""

    @abstractmethod
    def __len__(self) -> int:
        """How many samples there are."""

    @abstractmethod
    def __getitem__(self, ids: Sequence[int]) -> Microbatch:
        """The samples of these numbers: a function of them alone, the same in every process."""


class EvalSplit(Protocol):
    """A whole split for evaluation: each target once, the last microbatch filled up with targets of IGNORE."""

    def __len__(self) -> int:
        """How many microbatches there are; 0: nothing to evaluate on."""

    def __getitem__(self, index: int, /) -> Microbatch: ...


@dataclass(frozen=True)
class Source:
    """Data, ready to train on. sha256: the identity of its content, equal in all processes.

    answer_length: how many of each sample's last targets are its answer (a label, a sum). A sample is right if all of
    them are the likeliest tokens; 0: the data asks no question.
    """

    train: Samples
    validation: EvalSplit
    vocabulary: Vocabulary
    sha256: str
    answer_length: int = 0
