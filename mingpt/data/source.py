"""What the trainer reads from: `Source`, the one interface of all kinds of data (a kind of data opens it).

A microbatch is (tokens, targets), (tokens, targets, weights) or (tokens, targets, weights, documents): tensors of one
shape, of int64, int64, float32 and int64. The trainer passes them to the model's forward as they are. A target of
model.IGNORE does not count in the loss; a weight is the factor of its target's loss; a token attends only to tokens of
its own document.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils.data import Dataset

from mingpt.compute.mixture import Mixture

Microbatch = tuple[Tensor, ...]


class Vocabulary(Protocol):
    """Two vocabularies are the same if their JSON is."""

    @property
    def size(self) -> int:
        """The number of tokens, which are 0 to size - 1."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON with a `kind`; `vocabulary_of` builds the vocabulary from it."""


@runtime_checkable
class TextVocabulary(Vocabulary, Protocol):
    """A vocabulary whose tokens spell text."""

    def encode(self, text: str) -> list[int]:
        """Raises UserError if no tokens spell the text."""

    def decode(self, ids: Sequence[int]) -> str: ...


@runtime_checkable
class Spelling(Protocol):
    """A vocabulary that knows the length of its tokens as text, so that evaluation can compute bits per byte."""

    def byte_lengths(self) -> list[int]:
        """For each token, the bytes of text that it stands for; 0: it is no text. Empty list: not known."""


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


class SampledSplit:
    """A split that knows its samples, micro_size at a time, in order; the last microbatch may be shorter.

    chosen: which of the samples it takes, by number; None: all. size: how many.
    """

    def __init__(self, samples: Any, micro_size: int, chosen: Sequence[int] | None = None) -> None:
        self.samples, self.micro_size = samples, micro_size
        self.chosen = range(len(samples)) if chosen is None else chosen
        self.size = len(self.chosen)

    def __len__(self) -> int:
        """The number of microbatches."""
        return -(-self.size // self.micro_size)

    def __getitem__(self, index: int, /) -> Microbatch:
        found: Microbatch = self.samples[self.chosen[index * self.micro_size : (index + 1) * self.micro_size]]
        return found

    def evenly(self, most: int) -> "SampledSplit":
        """At most so many of its samples, spread evenly over it: the same ones whatever micro_size is."""
        return type(self)(self.samples, self.micro_size, [self.chosen[i] for i in spread(self.size, most)])


def spread(total: int, most: int) -> Sequence[int]:
    """At most `most` of the numbers below `total`, evenly."""
    return range(total) if most >= total else [i * total // most for i in range(most)]


class WholeMicrobatches(SampledSplit):
    """A split that does not know its samples, such as a user's own: each of its microbatches counts as one."""

    def __getitem__(self, index: int, /) -> Microbatch:
        found: Microbatch = self.samples[self.chosen[index]]
        return found


def sampled_split(split: EvalSplit) -> SampledSplit:
    return split if isinstance(split, SampledSplit) else WholeMicrobatches(split, 1)


@dataclass(frozen=True)
class Source:
    """Data, ready to train on. sha256: the identity of its content, equal in all processes.

    mixture: of which data sets `train` is made, and how they are mixed; None: it is one.
    """

    train: Samples
    validation: EvalSplit
    vocabulary: Vocabulary
    sha256: str
    mixture: Mixture | None = None
