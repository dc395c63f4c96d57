"""Random tokens, without a file: each sample is a function of its number."""

import json
from collections.abc import Sequence
from hashlib import sha256

import numpy as np
import torch

from mingpt.compute.batches import derive, mix
from mingpt.config.datasets import RandomData
from mingpt.data.source import Microbatch, Samples, Source, Vocabulary
from mingpt.data.vocabulary import Numbers
from mingpt.data.windows import PaddedBatches
from mingpt.errors import UserError


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


def open_random(config: RandomData, block_size: int, vocabulary: Vocabulary | None) -> Source:
    """No validation: there is nothing to learn. Raises UserError if the snapshot has another vocabulary."""
    own = Numbers(config.vocabulary)
    if vocabulary is not None and vocabulary.to_json() != own.to_json():
        raise UserError(
            "data.kind=random has another vocabulary than the snapshot: set the keys of data as they were when it was "
            "trained"
        )
    train = RandomTokens(config.vocabulary, config.samples, block_size)
    nothing = PaddedBatches(RandomTokens(config.vocabulary, 0, block_size), 1)
    # The tokens are a function of these keys, so the content's sha256 is theirs.
    keys = config.model_dump(exclude={"workers"})
    return Source(train, nothing, own, sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest())
