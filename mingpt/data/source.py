"""Where tokens come from, as the trainer sees it: one form for all kinds of data, told apart in one place.

A microbatch is (tokens, targets) or (tokens, targets, weights): tensors of one shape each, int64, int64 and float32,
which the model takes as they are. A target of model.IGNORE does not count; a weight is how much a target counts.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.utils.data import Dataset

from mingpt.config import Data, ImagesData, OwnData, QuestionData, RandomData, ShardsData, TextData
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


class Microbatches(Protocol):
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
    validation: Microbatches
    vocabulary: Vocabulary
    sha256: str
    answer_length: int = 0


def open_source(data: Data, block_size: int, micro_size: int, vocabulary: Vocabulary | None = None) -> Source:
    """What `data.kind` names, in samples of block_size tokens; validation in microbatches of micro_size samples.

    vocabulary: that of a snapshot, to be used in place of one made from the data.
    Raises Mistake, naming the key, if the data can't be read, or does not fit.
    """
    # Imported where they are needed: a kind may bring packages that the others do without.
    match data:
        case TextData():
            from mingpt.data.text import open_text

            return open_text(data, block_size, micro_size, vocabulary)
        case ShardsData():
            from mingpt.data.shards import open_shards

            return open_shards(data, block_size, micro_size, vocabulary)
        case ImagesData():
            from mingpt.data.images import open_images

            return open_images(data, block_size, micro_size, vocabulary)
        case QuestionData():
            from mingpt.data.synthetic import open_questions

            return open_questions(data, block_size, micro_size, vocabulary)
        case RandomData():
            from mingpt.data.synthetic import open_random

            return open_random(data, block_size, vocabulary)
        case OwnData():
            from mingpt.data.own import open_own

            return open_own(data, block_size, micro_size)
    raise AssertionError(f"no source for {type(data).__name__}")
