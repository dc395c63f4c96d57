"""Your own data for the package's GPT: questions with their answers, `experiment=synthetic`.

    mingpt train experiment=synthetic data._target_=examples.questions.sorting model.block_size=16

All questions are numbered. A seeded permutation shuffles the numbers: the first ones validate and the others train, so
no question is in both splits. Only the answer's tokens are targets.
"""

from collections.abc import Callable

import numpy as np
import torch

from mingpt.compute.batches import derive, permute
from mingpt.data.own import source_of
from mingpt.data.source import Source
from mingpt.data.vocabulary import Characters
from mingpt.errors import UserError
from mingpt.model.language import IGNORE

DIGITS = "0123456789"


def addition(block_size: int, micro_size: int, digits: int = 2, validation: int = 1000) -> Source:
    """Sums of two numbers of so many digits, as 07+35=042. block_size, micro_size: model's and batch's."""

    def ask(number: int) -> tuple[str, str]:
        a, b = divmod(number, 10**digits)
        return f"{a:0{digits}}+{b:0{digits}}=", f"{a + b:0{digits + 1}}"

    return questions(ask, 10 ** (2 * digits), DIGITS + "+=", block_size, micro_size, validation)


def sorting(block_size: int, micro_size: int, digits: int = 8, count: int = 50_000, validation: int = 1000) -> Source:
    """Digits to put in order, as 31415926=11234569. count: how many of the 10**digits words there are in all."""

    def ask(number: int) -> tuple[str, str]:
        word = f"{number:0{digits}}"
        return word + "=", "".join(sorted(word))

    return questions(ask, 10**digits, DIGITS + "=", block_size, micro_size, validation, count)


def questions(
    ask: Callable[[int], tuple[str, str]],
    total: int,
    characters: str,
    block_size: int,
    micro_size: int,
    validation: int,
    count: int | None = None,
) -> Source:
    """A Source of `count` of the questions with the numbers below `total`. ask: from a number to its words."""
    vocabulary = Characters("".join(sorted(characters)))
    question, answer = ask(0)
    length = len(question + answer) - 1  # the model sees all but the last token
    if length > block_size:
        raise UserError(f"model.block_size={block_size}, but a question takes {length} tokens: set it to {length}")
    numbers = permute(np.arange(min(count or total, total)), total, derive("questions"))
    if validation >= len(numbers):
        raise UserError(f"data.validation={validation} of {len(numbers)} questions leaves none to train on: lower it")
    rows = torch.tensor([vocabulary.encode("".join(ask(int(number)))) for number in numbers])
    tokens, targets = rows[:, :-1], rows[:, 1:].clone()
    targets[:, : -len(answer)] = IGNORE
    held = slice(validation)
    return source_of((tokens[validation:], targets[validation:]), (tokens[held], targets[held]), micro_size, vocabulary)
