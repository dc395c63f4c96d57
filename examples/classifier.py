"""Your own model and data: `experiment=classifier` classifies rows of ten numbers.

mingpt trains any torch module whose forward takes a microbatch and returns (loss_sum, count). The data comes from a
function that returns a mingpt.data.source.Source.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingpt.data.own import source_of
from mingpt.data.source import Source


class Classifier(nn.Module):
    """Two hidden layers, n_in -> hidden -> hidden -> classes."""

    def __init__(self, n_in: int = 10, hidden: int = 50, classes: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(n_in, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, classes),
        )

    def forward(self, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the losses, and the number of rows. A sum, not a mean: the losses of microbatches are added up."""
        loss_sum = F.cross_entropy(self.layers(rows), labels, reduction="sum")
        return loss_sum, torch.tensor(float(len(rows)), device=rows.device)


def rows(micro_size: int, count: int = 4096, n_in: int = 10, seed: int = 1) -> Source:
    """Points of a normal distribution. The label says whether a point lies outside the sphere that has half of them.

    The result depends on the arguments alone, so every process makes the same data. micro_size is batch.micro_size.
    """
    points = torch.randn(count, n_in, generator=torch.Generator().manual_seed(seed))
    labels = (points.square().sum(1) > n_in - 2 / 3).long()  # about the median of chi-squared
    border = count * 9 // 10
    return source_of((points[:border], labels[:border]), (points[border:], labels[border:]), micro_size)
