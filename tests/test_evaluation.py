"""mingpt.evaluation: each target and each question once, and the same figures whatever the world."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mingpt.distributed import World, share
from mingpt.evaluation import Figures, answers, evaluate
from mingpt.model import GPT, IGNORE, GPTConfig
from mingpt.reduction import tree_sum_of
from snapshot_kit import ALONE

CONFIG = GPTConfig(vocab_size=5, block_size=6, n_layer=1, n_head=2, n_embd=8, vocab_multiple=8)


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.4)
    return model


def split(microbatches: int, weighted: bool = False) -> list[tuple[Tensor, ...]]:
    """Microbatches of three samples; the last sample of all is filled up."""
    drawn = torch.Generator().manual_seed(1)
    out: list[tuple[Tensor, ...]] = []
    for i in range(microbatches):
        tokens, targets = torch.randint(5, (2, 3, 6), generator=drawn)
        if i == microbatches - 1:
            targets[2] = IGNORE
        out.append((tokens, targets, torch.rand(3, 6, generator=drawn)) if weighted else (tokens, targets))
    return out


@dataclass(frozen=True)
class Pretended(World):
    """One process of a larger world, whose messages are passed on by hand."""

    said: dict[int, Any] = field(default_factory=dict)

    def gather(self, value: Any) -> list[Any]:
        self.said[self.rank] = value
        return [self.said[rank] for rank in sorted(self.said)]


def in_worlds_of(size: int, model: nn.Module, data: list[tuple[Tensor, ...]], answer_length: int) -> Figures:
    world = Pretended(0, size, 0, torch.device("cpu"), "gloo")
    for rank in sorted(range(size), key=lambda rank: not share(rank, size, len(data))):  # the last one has heard all
        figures = evaluate(model, data, replace(world, rank=rank), nullcontext(), answer_length)
    return figures


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", [2, 3, 7, 9])
def test_the_figures_are_the_same_in_any_world(model: GPT, size: int, weighted: bool) -> None:
    data = split(7, weighted)
    alone = evaluate(model, data, ALONE, nullcontext(), 2)
    assert in_worlds_of(size, model, data, 2) == alone
    assert alone.questions == 7 * 3 - 1


@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_that_of_forward_to_the_bit_with_questions_and_without(model: GPT, weighted: bool) -> None:
    data = split(3, weighted)
    with torch.no_grad():
        forward = [model(*tensors) for tensors in data]
    expected = tree_sum_of([loss.item() for loss, _ in forward]) / sum(count.item() for _, count in forward)
    without, asked = (evaluate(model, data, ALONE, nullcontext(), n) for n in (0, 2))
    assert without.loss == asked.loss == expected
    assert without.accuracy is None
    assert (without.right, without.questions) == (0, 0)


@pytest.mark.parametrize("length", [1, 2, 6])
def test_a_sample_is_right_if_all_of_its_answer_is_the_likeliest(model: GPT, length: int) -> None:
    tokens = torch.randint(5, (200, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        likeliest = model.eval().logits(tokens).argmax(-1)
    targets = likeliest.clone()
    targets[:50, -length] += 1  # wrong in the first token of the answer
    targets[50:100, -1] += 1  # in the last one
    if length < 6:
        targets[100:150, 5 - length] += 1  # before the answer: does not matter
    figures = evaluate(model, [(tokens, targets % 5)], ALONE, nullcontext(), length)
    assert (figures.right, figures.questions, figures.accuracy) == (100, 200, 0.5)


def test_what_is_ignored_is_neither_right_nor_wrong() -> None:
    logits = torch.eye(4)[torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])]
    targets = torch.tensor(
        [
            [0, 2, 3],  # right
            [0, IGNORE, 3],  # right in all that counts
            [0, IGNORE, 1],  # wrong
            [1, IGNORE, IGNORE],  # no question
        ]
    )
    assert [int(x) for x in answers(logits, targets, 2)] == [2, 3]


def test_the_padding_of_the_vocabulary_is_never_the_answer(model: GPT) -> None:
    """Untrained padding rows may well have the largest of the raw logits."""
    padded = GPT(CONFIG)
    padded.load_state_dict(model.state_dict())
    tokens = torch.randint(5, (64, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        padded.transformer.wte.weight[5:] *= 100
        raw = padded.eval().padded_logits(padded.transformer(tokens)).argmax(-1)
        _, _, logits = padded.loss_and_logits(tokens, tokens)
    assert (raw >= 5).any()
    assert (logits.argmax(-1) < 5).all()


class Own(nn.Module):
    """A model of one's own that keeps the small protocol only."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return tokens.sum().float(), (targets != IGNORE).sum().float()


def test_a_model_without_logits_has_its_loss_alone() -> None:
    data = split(2)
    figures = evaluate(Own(), data, ALONE, nullcontext(), 2)
    assert figures == Figures(sum(int(tokens.sum()) for tokens, _ in data) / 30, 30)
    assert figures.accuracy is None
