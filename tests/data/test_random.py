"""Random tokens: nothing but the sample's number in them."""

import pytest
import torch

from mingpt.config.datasets import RandomData
from mingpt.data.opening import open_data
from mingpt.data.vocabulary import Numbers
from mingpt.errors import UserError


def test_random_tokens_fill_any_block_with_any_vocabulary() -> None:
    """A sample is a function of its number."""
    samples = open_data(RandomData(vocabulary=1000, samples=64), 256, 4).train
    tokens, targets = samples[range(64)]
    assert (tokens.shape, len(tokens.unique())) == ((64, 256), 1000)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(samples[[63, 5]][0], tokens[[63, 5]])


def test_a_snapshot_with_another_vocabulary_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r"^data\.kind=random has another vocabulary than the snapshot"):
        open_data(RandomData(vocabulary=5), 16, 4, Numbers(4))
    assert open_data(RandomData(vocabulary=5), 16, 4, Numbers(5)).vocabulary == Numbers(5)
