"""Tasks without files: sums, sorting, random tokens. Each sample is a function of its number.

All questions of a kind are numbered. A seeded permutation (batches.permute, which takes no memory) shuffles the
numbers. The first data.val_samples of them validate and the others train: no question is in both splits.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from string import ascii_letters, digits
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from pydantic import Field

from mingpt.compute.batches import derive, mix, permute
from mingpt.config.kinds import Data, register
from mingpt.data.source import Microbatch, Samples, Source
from mingpt.data.vocabulary import Characters, Numbers, Vocabulary
from mingpt.data.windows import PaddedBatches
from mingpt.errors import UserError
from mingpt.model.language import IGNORE

if TYPE_CHECKING:
    from mingpt.config.schema import Config


MOST_QUESTIONS = 2**62  # their numbers are 64-bit integers


class QuestionData(Data):
    """Questions that are made, not read. Each kind says how many there are and how many tokens one takes."""

    val_samples: int = Field(default=1000, ge=0)
    """Questions that are kept for validation; training never asks them."""

    reads = ("data.val_samples", "data.digits", "data.letters", "data.alphabet", "model.block_size")

    @property
    def questions(self) -> int:
        """How many different questions there are."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """The tokens that the model sees of a question with its answer: all but the last."""
        raise NotImplementedError

    def problem(self, config: "Config") -> str | None:
        if self.questions > MOST_QUESTIONS:
            return (
                f"data.alphabet and data.letters make {self.questions:.0e} questions, more than {MOST_QUESTIONS:.0e}: "
                f"lower one of them"
            )
        if self.val_samples >= self.questions:
            return (
                f"data.val_samples={self.val_samples} of {self.questions} questions leaves none to train on: lower it"
            )
        if self.length > config.model.block_size:
            return (
                f"model.block_size={config.model.block_size}, but a question of data.kind={self.kind} takes "
                f"{self.length} tokens: set model.block_size={self.length}"
            )
        return None

    def vocabulary_size(self) -> int:
        return 100


@register
class AdditionData(QuestionData):
    kind: Literal["addition"] = "addition"
    """sums, as 07+35=042"""
    digits: int = Field(default=2, ge=1, le=9)
    """Digits of each of the two numbers; the sum has one more."""
    reverse: bool = False
    """Write the sum from its last digit to its first, 07+35=240: the order in which carrying finds them."""

    @property
    def questions(self) -> int:
        return 10 ** (2 * self.digits)

    @property
    def length(self) -> int:
        return 3 * self.digits + 2

    def open(self, block_size: int, micro_size: int, vocabulary: Vocabulary | None = None) -> Source:
        return open_questions(self, partial(addition, self.digits, self.reverse), digits + "+=", micro_size, vocabulary)


@register
class SortData(QuestionData):
    kind: Literal["sort"] = "sort"
    """letters to put in order, as 3120=0123"""
    letters: int = Field(default=8, ge=1, le=64)
    """How many letters a question has."""
    alphabet: int = Field(default=10, ge=2, le=62)
    """How many different letters there are: 0 to 9, A to Z, a to z."""

    @property
    def questions(self) -> int:
        return int(self.alphabet**self.letters)

    @property
    def length(self) -> int:
        return 2 * self.letters

    def open(self, block_size: int, micro_size: int, vocabulary: Vocabulary | None = None) -> Source:
        ask = partial(sorting, self.letters, self.alphabet)
        return open_questions(self, ask, ALPHABET[: self.alphabet] + "=", micro_size, vocabulary)


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


ALPHABET = "".join(sorted(digits + ascii_letters))  # 0 to 9, A to Z, a to z
Ask = Callable[[int], tuple[str, str]]  # from a number to its question and answer


def addition(width: int, reverse: bool, number: int) -> tuple[str, str]:
    """The sum of that number, of two terms of `width` digits. reverse: the answer begins with its last digit."""
    a, b = divmod(number, 10**width)
    answer = f"{a + b:0{width + 1}}"
    return f"{a:0{width}}+{b:0{width}}=", answer[::-1] if reverse else answer


def sorting(count: int, alphabet: int, number: int) -> tuple[str, str]:
    """The word of that number, of `count` letters, and its letters in order. alphabet: how many letters there are."""
    letters = [ALPHABET[number // alphabet**i % alphabet] for i in range(count)]
    return "".join(letters) + "=", "".join(sorted(letters))


class Questions(Samples):
    """The questions from `first` to `first + count` in the shuffled order; targets are their answers alone."""

    def __init__(self, ask: Ask, vocabulary: Characters, questions: int, first: int, count: int) -> None:
        self.ask, self.vocabulary, self.questions, self.first, self.count = ask, vocabulary, questions, first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, ids: Sequence[int]) -> Microbatch:
        """(tokens, targets), each (len(ids), length) int64."""
        positions = self.first + np.asarray(ids, dtype=np.int64)
        asked = [self.ask(int(n)) for n in permute(positions, self.questions, derive("questions"))]
        rows = torch.tensor([self.vocabulary.encode(question + answer) for question, answer in asked])
        tokens, targets = rows[:, :-1], rows[:, 1:].clone()
        targets[:, : -len(asked[0][1])] = IGNORE
        return tokens, targets


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


def open_questions(
    config: QuestionData, ask: Ask, used: str, micro_size: int, vocabulary: Vocabulary | None = None
) -> Source:
    """used: the characters of all questions and answers. Raises UserError if the snapshot has another vocabulary."""
    own = Characters("".join(sorted(used)))
    _check_vocabulary(config, own, vocabulary)
    held = config.val_samples
    train = Questions(ask, own, config.questions, held, config.questions - held)
    validation = PaddedBatches(Questions(ask, own, config.questions, 0, held), micro_size)
    return Source(train, validation, own, _identity(config), answer_length=len(ask(0)[1]))


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
