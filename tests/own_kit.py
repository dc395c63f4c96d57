"""Models and data of somebody's own, most of them wrong in one way, for tests/test_own_model.py."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from examples.classifier import Classifier, rows
from mingpt.data.own import Rows, source_of
from mingpt.data.source import Source

NOT_CALLABLE = 3


class Linear(nn.Module):
    def __init__(self, n_in: int = 10) -> None:
        super().__init__()
        self.layer = nn.Linear(n_in, 2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(self.layer(x), y, reduction="sum"), (y >= 0).sum()


class NoForward(nn.Module):
    pass


class Plain:
    pass


class OneTensor(Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return self.layer(x)


class Means(Linear):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, int]:  # type: ignore[override]
        return nn.functional.cross_entropy(self.layer(x), y), len(x)


class Idle(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3)


class Normed(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(self.norm(x), y)


class Complex(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class Unlucky(Linear):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        raise KeyError("no luck")


class Quits(Linear):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        raise SystemExit(0)


class QuitsLater(Classifier):
    """In a call after those with which it is tried out."""

    calls = 0

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls == 8:
            raise SystemExit(0)
        return super().forward(x, y)


class Infinite(Linear):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss, count = super().forward(x, y)
        return loss * float("inf"), count


class Uncounted(Linear):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss, count = super().forward(x, y)
        return loss, count * float("nan")


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(self.layer(x), y, reduction="sum"), (y >= 0).sum()


def gives_none() -> None:
    return None


def fails(hidden: int) -> nn.Module:
    raise ValueError(f"{hidden} is odd")


def quits() -> nn.Module:
    raise SystemExit(0)


def by_vocabulary(vocab_size: int, block_size: int) -> nn.Module:
    return Classifier(n_in=10, hidden=vocab_size + block_size)


def no_rows(micro_size: int) -> Source:
    return source_of((torch.zeros(0, 10),), (torch.zeros(0, 10),), micro_size)


def uneven(micro_size: int) -> Source:
    return source_of((torch.zeros(3, 10), torch.zeros(2)), (torch.zeros(0, 10), torch.zeros(0)), micro_size)


class QuittingLength(Rows):
    def __len__(self) -> int:
        raise SystemExit(0)


def quits_when_asked_for_its_length(micro_size: int) -> Source:
    return replace(rows(micro_size, count=10), train=QuittingLength(torch.zeros(10, 10)))


def cannot_be_had(micro_size: int, url: str) -> Source:
    raise OSError(f"no answer from {url}")


def ten_rows(micro_size: int) -> Source:
    return rows(micro_size, count=10)
