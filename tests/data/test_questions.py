"""examples/questions.py: right answers, splits that do not meet, and a GPT that trains on them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from examples.questions import addition, sorting
from mingpt.data.source import Source
from mingpt.data.vocabulary import Characters
from mingpt.errors import UserError
from mingpt.model.language import IGNORE
from tests.kits.replay_kit import train_here
from tests.kits.verb_kit import mingpt


def asked(source: Source) -> list[str]:
    """Each question with its answer."""
    assert isinstance(source.vocabulary, Characters)
    found = list[str]()
    for part in (
        source.train[range(len(source.train))],
        *(source.validation[i] for i in range(len(source.validation))),
    ):
        for tokens, targets in zip(part[0].tolist(), part[1].tolist(), strict=True):
            words = source.vocabulary.decode([*tokens, targets[-1]])
            answer = words.partition("=")[2]
            assert [t != IGNORE for t in targets] == [False] * (len(targets) - len(answer)) + [True] * len(answer)
            found.append(words)
    return found


def test_every_question_is_asked_once_and_only_its_answer_is_a_target() -> None:
    sums = asked(addition(8, 4, validation=1001))
    assert len({*sums}) == len(sums) == 10**4
    for words in sums:
        terms, _, answer = words.partition("=")
        assert answer == f"{sum(map(int, terms.split('+'))):03}"
    sorted_words = asked(sorting(16, 4, count=500, validation=99))
    assert len({*sorted_words}) == len(sorted_words) == 500
    assert all(word[9:] == "".join(sorted(word[:8])) for word in sorted_words)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: addition(7, 4), "model.block_size=7"),
        (lambda: addition(8, 4, validation=10**4), "data.validation=10000"),
        (lambda: sorting(16, 4, count=1000), "data.validation=1000"),
    ],
)
def test_what_cannot_be_asked_is_a_mistake(make: Callable[[], Source], key: str) -> None:
    with pytest.raises(UserError, match=key):
        make()


def test_a_gpt_trains_on_them_and_goes_on_with_a_question(tmp_path: Path) -> None:
    train_here(
        str(tmp_path / "sums"), "experiment=synthetic", "model.n_layer=1", "model.n_embd=16", "train.max_steps=2"
    )
    text = mingpt(f"generate {tmp_path}/sums --prompt 12+34= --tokens 3 --temperature 0")
    assert len(text.strip().removeprefix("12+34=")) == 3
