"""Sums, sorting and random tokens: right answers, splits that do not meet, nothing but the sample's number in it."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from config_kit import problems
from mingpt.commands import generate
from mingpt.config.kinds import Data
from mingpt.data.padding import PaddedBatches
from mingpt.data.source import Source
from mingpt.data.synthetic import AdditionData, RandomData, RandomTokens, SortData, addition, sorting
from mingpt.data.vocabulary import Characters, Numbers
from mingpt.errors import UserError
from mingpt.model.language import IGNORE
from replay_kit import train_here


def opened(data: Data, block_size: int = 32, micro_size: int = 4) -> Source:
    return data.open(block_size, micro_size)


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


@pytest.mark.parametrize("data", [AdditionData(val_samples=1000), SortData(letters=4, alphabet=7, val_samples=99)])
def test_every_question_is_asked_once_with_its_answer(data: AdditionData | SortData) -> None:
    """The splits do not meet."""
    source = opened(data)
    assert isinstance(source.vocabulary, Characters)
    assert isinstance(source.validation, PaddedBatches)
    lines = []
    for samples in (source.train, source.validation.samples):
        tokens, targets = samples[range(len(samples))]
        lines += [source.vocabulary.decode(row) for row in torch.cat([tokens, targets[:, -1:]], 1).tolist()]
    assert len(source.validation.samples) == data.val_samples
    assert len(lines) == len(set(lines)) == (10**4 if isinstance(data, AdditionData) else 7**4)
    for question, answer in (line.split("=") for line in lines):
        assert answer == (f"{sum(map(int, question.split('+'))):03d}" if "+" in question else "".join(sorted(question)))


@pytest.mark.parametrize("data", [AdditionData(digits=9), SortData(letters=10, alphabet=62), RandomData(vocabulary=7)])
def test_a_sample_is_a_function_of_its_number(data: Data) -> None:
    source, again = opened(data), opened(data)
    assert source.sha256 == again.sha256 != opened(AdditionData()).sha256
    ids = [len(source.train) - 1, 3, 0]
    together = source.train[ids]
    apart = [pickle.loads(pickle.dumps(again.train))[[i]] for i in ids]
    for whole, parts in zip(together, zip(*apart, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts))


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
    ("overrides", "key"),
    [
        ("data.digits=3", "model.block_size"),
        ("data.val_samples=10000", "data.val_samples"),
        ("data=sort data.letters=64", "data.letters"),
    ],
)
def test_what_cannot_be_asked_is_a_mistake(overrides: str, key: str) -> None:
    (problem,) = problems("experiment=synthetic", *overrides.split())
    assert key in problem


def test_a_model_of_sums_is_asked_in_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The experiment's model, trained for a moment: what it says is digits; that it is right takes a minute."""
    train_here(str(tmp_path), "experiment=synthetic", "~model", "train.max_steps=1")
    capsys.readouterr()
    assert generate.main([str(tmp_path), "--prompt", "12+34=", "--tokens", "3", "--temperature", "0"]) == 0
    assert len(capsys.readouterr().out.removeprefix("12+34=")) == len("046\n")
