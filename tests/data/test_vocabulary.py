"""What a manifest gives back as its vocabulary, what it can't make a reader do, and tokens that spell no text."""

import pytest
import torch

from mingpt.config.datasets import RandomData
from mingpt.data.opening import open_data
from mingpt.data.vocabulary import Numbers, vocabulary_of
from mingpt.errors import UserError


@pytest.mark.parametrize(
    ("content", "about"),
    [
        ({}, "char, byte"),
        ({"kind": ["char"]}, "char, byte"),
        ({"kind": "os.system"}, "char, byte"),
        ({"kind": "char"}, "characters"),
        *(({"kind": "gpt2", "merges": merges}, "gpt2") for merges in (5, "a b c", "a 漢", "a b\na b")),
        *(({"kind": "tokenizer.json", "text": text}, "tokenizer") for text in ("/etc/passwd", '{"model": {}}')),
    ],
)
def test_a_strangers_vocabulary_is_refused(content: dict[str, object], about: str) -> None:
    with pytest.raises(UserError, match=about):
        vocabulary_of(content)


def test_numbers_are_their_own_text() -> None:
    assert Numbers(12).decode(Numbers(12).encode("11 0 3")) == "11 0 3"
    for text in ("12", "-1", "a", "", "1.5"):
        with pytest.raises(UserError, match="from 0 to 11"):
            Numbers(12).encode(text)


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
