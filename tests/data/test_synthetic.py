"""Sums, sorting and random tokens: right answers, splits that do not meet, nothing but the sample's number in it."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mingpt.config import compose
from mingpt.config.kinds import Data
from mingpt.data.kinds.addition import AdditionData
from mingpt.data.kinds.random import RandomData
from mingpt.data.kinds.sort import SortData
from mingpt.data.padding import PaddedBatches
from mingpt.data.source import Samples, Source
from mingpt.data.synthetic import RandomTokens, addition, sorting
from mingpt.data.vocabulary import Characters, Numbers
from mingpt.errors import UserError
from mingpt.model.language import IGNORE


def opened(data: Data, block_size: int = 32, micro_size: int = 4) -> Source:
    return data.open(block_size, micro_size)


def lines(source: Source, samples: Samples) -> list[str]:
    """Each sample as the text that it is: all tokens, and the last target."""
    assert isinstance(source.vocabulary, Characters)
    tokens, targets = samples[range(len(samples))]
    return [source.vocabulary.decode(row) for row in torch.cat([tokens, targets[:, -1:]], 1).tolist()]


@pytest.mark.parametrize(
    ("line", "number", "reverse"), [("07+35=042", 735, False), ("99+99=198", 9999, False), ("07+35=240", 735, True)]
)
def test_a_sum(line: str, number: int, reverse: bool) -> None:
    assert "".join(addition(2, reverse, number)) == line


def test_a_sorted_word() -> None:
    assert sorting(4, 3, 2 + 0 * 3 + 1 * 9 + 0 * 27) == ("2010=", "0012")
    assert sorting(3, 62, 61 + 36 * 62 + 0) == ("za0=", "0az")


def test_only_the_answer_is_a_target() -> None:
    source = opened(AdditionData())
    tokens, targets = source.train[[5]]
    assert source.answer_length == 3
    assert tokens.shape == targets.shape == (1, 8)
    assert targets[0, :5].tolist() == [IGNORE] * 5
    assert torch.equal(targets[:, 5:7], tokens[:, 6:])


def test_every_sum_is_asked_once_and_the_splits_do_not_meet() -> None:
    source = opened(AdditionData(val_samples=1000))
    assert isinstance(source.validation, PaddedBatches)
    train, held = lines(source, source.train), lines(source, source.validation.samples)
    assert (len(train), len(held)) == (9000, 1000)
    assert len(set(train) | set(held)) == 10_000
    for line in train + held:
        a, b, c = int(line[:2]), int(line[3:5]), int(line[6:])
        assert a + b == c


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 8), st.integers(2, 62), st.integers(0, 2**30))
def test_answers_are_sorted(letters: int, alphabet: int, start: int) -> None:
    source = opened(SortData(letters=letters, alphabet=alphabet, val_samples=1))
    ids = [(start + i) % len(source.train) for i in range(3)]
    tokens, targets = source.train[ids]
    assert isinstance(source.vocabulary, Characters)
    for row in torch.cat([tokens, targets[:, -1:]], 1).tolist():
        question, answer = source.vocabulary.decode(row).split("=")
        assert "".join(sorted(question)) == answer


@pytest.mark.parametrize("data", [AdditionData(digits=9), SortData(letters=10, alphabet=62), RandomData(vocabulary=7)])
def test_a_sample_is_a_function_of_its_number(data: Data) -> None:
    source, again = opened(data), opened(data)
    assert source.sha256 == again.sha256
    ids = [len(source.train) - 1, 3, 0]
    together = source.train[ids]
    apart = [pickle.loads(pickle.dumps(again.train))[[i]] for i in ids]
    for whole, parts in zip(together, zip(*apart, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))


def test_other_keys_are_other_data() -> None:
    data = [AdditionData(), AdditionData(reverse=True), SortData(), RandomData(), RandomData(vocabulary=9)]
    assert len({opened(d).sha256 for d in data}) == len(data)
    assert opened(AdditionData(workers=3)).sha256 == opened(AdditionData()).sha256


def test_random_tokens_fill_any_block_with_any_vocabulary() -> None:
    source = opened(RandomData(vocabulary=1000, samples=64), block_size=256)
    tokens, targets = source.train[range(64)]
    assert tokens.shape == (64, 256)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert (int(tokens.min()), int(tokens.max())) == (0, 999)
    assert 200 < len(np.unique(tokens[0])) < 256  # as dice fall: 226 on average
    assert source.vocabulary == Numbers(1000)
    assert len(source.validation) == 0


def test_padded_batches_ask_each_sample_once_and_ignore_the_padding() -> None:
    split = PaddedBatches(RandomTokens(5, 7, 2), 3)
    assert len(split) == 3
    targets = torch.cat([split[i][1] for i in range(3)])
    assert targets.shape == (9, 2)
    assert torch.equal(targets[:7], RandomTokens(5, 7, 2)[range(7)][1])
    assert (targets[7:] == IGNORE).all()


def test_a_snapshot_with_another_vocabulary_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r"^data\.kind=sort has another vocabulary than the snapshot"):
        SortData().open(16, 4, Characters("ab"))
    assert SortData().open(16, 4, Characters("0123456789=")).vocabulary == Characters("0123456789=")


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("data.digits=3", "model.block_size=8, but a question of data.kind=addition takes 11 tokens: "
         "set model.block_size=11"),
        ("data.val_samples=10000", "data.val_samples=10000 of 10000 questions leaves none to train on: lower it"),
        ("data.digits=10", "data.digits=10: must be less than or equal to 9"),
        ("data=sort data.letters=64", "data.alphabet and data.letters make 1e+64 questions, more than 5e+18: "
         "lower one of them"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_a_mistake(overrides: str, problem: str) -> None:
    with pytest.raises(UserError) as mistake:
        compose.configure(["experiment=synthetic", *overrides.split()])
    assert mistake.value.problems == (problem,)


def test_the_experiment_fits_its_data() -> None:
    for more in ([], ["data=sort", "model.block_size=16"], ["data=random"]):
        config = compose.configure(["experiment=synthetic", *more])
        assert config is not None
        opened(config.data, config.model.block_size)
