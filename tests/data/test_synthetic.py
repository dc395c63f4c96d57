"""Sums, sorting and random tokens: right answers, splits that do not meet, nothing but the sample's number in it."""

import pytest
import torch

from config_kit import problems
from mingpt.data.synthetic import AdditionData, RandomData, SortData, addition, sorting
from mingpt.data.vocabulary import Characters
from mingpt.errors import UserError
from mingpt.model.language import IGNORE


def test_a_sum_and_a_sorted_word() -> None:
    """What a number stands for: a run's data, which no later version may change."""
    assert [addition(2, reverse, 735) for reverse in (False, True)] == [("07+35=", "042"), ("07+35=", "240")]
    assert sorting(4, 3, 2 + 0 * 3 + 1 * 9 + 0 * 27) == ("2010=", "0012")
    assert sorting(3, 62, 61 + 36 * 62 + 0) == ("za0=", "0az")


@pytest.mark.parametrize("data", [AdditionData(val_samples=1001), SortData(letters=4, alphabet=7, val_samples=99)])
def test_every_question_is_asked_once_and_only_its_answer_is_a_target(data: AdditionData | SortData) -> None:
    """The splits do not meet; samples that fill up the last microbatch of validation are ignored."""
    source = data.open(32, 4)
    assert isinstance(source.vocabulary, Characters)
    asked, batches = list[str](), [source.validation[i] for i in range(len(source.validation))]
    for tokens, targets in (source.train[range(len(source.train))], *batches):
        answers = targets[:, -source.answer_length :]
        assert (targets[:, : -source.answer_length] == IGNORE).all()
        for question, answer in zip(tokens.tolist(), answers.tolist(), strict=True):
            if answer[0] != IGNORE:
                words = source.vocabulary.decode([*question, answer[-1]])
                asked.append(words)
                question, _, answer = words.partition("=")
                assert answer == (
                    f"{sum(map(int, question.split('+'))):03d}" if "+" in question else "".join(sorted(question))
                )
    assert len(asked) == len(set(asked)) == (10**4 if isinstance(data, AdditionData) else 7**4)


def test_random_tokens_fill_any_block_with_any_vocabulary() -> None:
    """A sample is a function of its number."""
    samples = RandomData(vocabulary=1000, samples=64).open(256, 4).train
    tokens, targets = samples[range(64)]
    assert (tokens.shape, len(tokens.unique())) == ((64, 256), 1000)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(samples[[63, 5]][0], tokens[[63, 5]])


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
