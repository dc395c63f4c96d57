"""How good a model is on a whole split: its loss, and the share of questions that it answers right.

The figures are the same for any world size: losses are added along one tree, counts are whole numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mingpt.compute.batches import derive
from mingpt.compute.reduction import tree_sum_of
from mingpt.data.source import EvalSplit
from mingpt.model.gpt2 import IGNORE
from mingpt.world.world import World


@runtime_checkable
class Predicts(Protocol):
    """What a model has besides `forward` if it can be asked questions."""

    def loss_and_logits(self, tokens: Tensor, targets: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(sum of the losses, number of targets, (batch, time, vocabulary) how likely each token is)."""


@dataclass(frozen=True)
class Figures:
    """loss: nats a target, NaN if none counts. targets: how many there were, or their weights.

    questions: samples that have an answer. spelled: bytes of text that the targets stand for.
    """

    loss: float
    targets: float
    right: int = 0
    questions: int = 0
    spelled: int = 0

    @property
    def accuracy(self) -> float | None:
        """The share of questions that were answered right; None if none was asked."""
        return self.right / self.questions if self.questions else None

    @property
    def bits_per_byte(self) -> float | None:
        """The loss of the whole split, in bits, over the length of its text: comparable between vocabularies."""
        return self.loss * self.targets / math.log(2) / self.spelled if self.spelled else None


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: EvalSplit,
    world: World,
    autocast: Any,
    answer_length: int = 0,
    byte_lengths: Sequence[int] = (),
    *,
    seed: int,
    step: int,
) -> Figures:
    """The model's figures on a split of at least one microbatch. All processes of the world call it, and get the same.

    answer_length: see Source. Without `loss_and_logits`, accuracy is not measured. byte_lengths: see Spelling.
    seed, step: the run's; a model that draws random numbers draws the same ones for a microbatch, whoever computes it.
    """
    model.eval()
    lengths, none = torch.tensor([*byte_lengths, 0], device=world.device), torch.zeros((), device=world.device)
    rows: list[Tensor] = []
    for microbatch in world.share(len(split)):
        tensors = [x.to(world.device) for x in split[microbatch]]
        targets, right, questions = tensors[1], none, none
        torch.manual_seed(derive("evaluation", seed, step, microbatch))
        with autocast:
            if answer_length and isinstance(model, Predicts):
                loss, count, logits = model.loss_and_logits(*tensors)
                right, questions = answers(logits, targets, answer_length)
            else:
                loss, count = model(*tensors)
        spelled = lengths[targets.where(targets != IGNORE, -1)].sum() if byte_lengths else none
        rows.append(torch.stack([x.double() for x in (loss, count, right, questions, spelled)]))
    mine = torch.stack(rows).tolist() if rows else []
    everybodys = [row for part in world.gather(mine) for row in part]
    losses, counts, *whole = zip(*everybodys, strict=True)
    total, targets = tree_sum_of(losses), sum(counts)
    return Figures(total / targets if targets else math.nan, targets, *(int(sum(column)) for column in whole))


def answers(logits: Tensor, targets: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """(right answers, questions) of a microbatch. Right: all of a sample's last `length` targets are the likeliest.

    Targets of IGNORE are neither right nor wrong; a sample that has nothing else there is no question.
    """
    wanted, likeliest = targets[:, -length:], logits[:, -length:].argmax(-1)
    counts = wanted != IGNORE
    questions = counts.any(1)
    right = questions & ((likeliest == wanted) | ~counts).all(1)
    return right.sum(), questions.sum()
