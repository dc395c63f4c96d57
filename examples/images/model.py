"""A convolutional network that classifies images, and says how many it has right."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(nn.Module):
    """Stages of two 3 x 3 convolutions, then one linear layer. side: an image's height and width.

    Each stage halves the sides, and has twice the channels of the one before; the first has `width`.
    """

    def __init__(
        self,
        side: int = 28,
        channels: int = 1,
        classes: int = 10,
        width: int = 16,
        stages: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for stage in range(stages):
            out = width * 2**stage
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.GELU()]
            layers += [nn.Conv2d(out, out, 3, stride=2, padding=1), nn.GroupNorm(1, out), nn.GELU()]
            channels, side = out, (side + 1) // 2
        self.features = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(dropout))
        self.head = nn.Linear(channels * side**2, classes)

    def loss_and_logits(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sum of the losses, the number of images, and the logits, by which evaluation measures the accuracy.

        images: (n, channels, side, side), bytes. labels: (n,).
        """
        logits = self.head(self.features(images / 255 - 0.5)).float()
        loss_sum = F.cross_entropy(logits, labels, reduction="sum")
        return loss_sum, torch.tensor(float(len(labels)), device=labels.device), logits

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.loss_and_logits(images, labels)[:2]
