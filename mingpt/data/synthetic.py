"""Random tokens, without a file: each sample is a function of its number."""

import json
from collections.abc import Sequence
from hashlib import sha256
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from mingpt.compute.batches import derive, mix
from mingpt.config.kinds import Data, register
from mingpt.data.source import Microbatch, Samples, Source
from mingpt.data.vocabulary import Numbers, Vocabulary
from mingpt.data.windows import PaddedBatches
from mingpt.errors import UserError


@register
class RandomData(Data):
    kind: Literal["random"] = "random"
    """random tokens without a file, to measure speed with"""
    vocabulary: int = Field(default=50257, ge=2, le=2**24)
    """How many different tokens there are."""
    samples: int = Field(default=1_000_000, ge=1)
    """How many samples, of model.block_size tokens each."""

    def open(self, block_size: int, micro_size: int, vocabulary: Vocabulary | None = None) -> Source:
        return open_random(self, block_size, vocabulary)

    def vocabulary_size(self) -> int:
        return self.vocabulary


class RandomTokens(Samples):
    """Samples of block_size uniformly random tokens, to measure speed."""

    def __init__(self, vocabulary: int, samples: int, block_size: int) -> None:
        self.vocabulary, self.samples, self.block_size = vocabulary, samples, block_size

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, ids: Sequence[int]) -> Microbatch:
        """(tokens, targets), each (len(ids), block_size) int64."""
        length = self.block_size + 1
        numbers = np.asarray(ids, dtype=np.int64)[:, None] * length + np.arange(length)
        mixed = mix(numbers.astype(np.uint64), derive("random"))
        rows = torch.from_numpy((mixed % np.uint64(self.vocabulary)).astype(np.int64))
        return rows[:, :-1], rows[:, 1:]


def open_random(config: RandomData, block_size: int, vocabulary: Vocabulary | None = None) -> Source:
    """No validation: there is nothing to learn. Raises UserError if the snapshot has another vocabulary."""
    own = Numbers(config.vocabulary)
    _check_vocabulary(config, own, vocabulary)
    train = RandomTokens(config.vocabulary, config.samples, block_size)
    return Source(train, PaddedBatches(RandomTokens(config.vocabulary, 0, block_size), 1), own, _identity(config))


def _check_vocabulary(config: Data, own: Vocabulary, given: Vocabulary | None) -> None:
    if given is not None and given.to_json() != own.to_json():
        raise UserError(
            f"data.kind={config.kind} has another vocabulary than the snapshot: set the keys of data as they were when "
            "it was trained"
        )


def _identity(config: Data) -> str:
    """The data's sha256 is that of its config: such data is a function of these keys."""
    what = config.model_dump(exclude={"workers"})
    return sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
