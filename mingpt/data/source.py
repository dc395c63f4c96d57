"""What the trainer reads from: `Source`, the one interface of all kinds of data (a kind of data opens it).

A microbatch is (tokens, targets), (tokens, targets, weights) or (tokens, targets, weights, documents): tensors of one
shape, of int64, int64, float32 and int64. The trainer passes them to the model's forward as they are. A target of
model.IGNORE does not count in the loss; a weight is the factor of its target's loss; a token attends only to tokens of
its own document.
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
    """The training set. Loader processes get a pickled copy, so it must be small when pickled; they open its files."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of samples."""

    @abstractmethod
    def __getitem__(self, ids: Sequence[int]) -> Microbatch:
        """The microbatch of the samples with these numbers: a function of them alone, the same in every process."""


class EvalSplit(Protocol):
    """A split for evaluation, in microbatches: each target once; targets of IGNORE fill up the last microbatch."""

    def __len__(self) -> int:
        """The number of microbatches; 0: nothing to evaluate on."""

    def __getitem__(self, index: int, /) -> Microbatch: ...


@dataclass(frozen=True)
class Source:
    """Data, ready to train on. sha256: the identity of its content, equal in all processes.

    answer_length: how many of each sample's last targets are its answer (a label, a sum); 0: the data has no answers.
    Evaluation counts a sample as right if each target of its answer is the likeliest token.
    """

    train: Samples
    validation: EvalSplit
    vocabulary: Vocabulary
    sha256: str
    answer_length: int = 0
