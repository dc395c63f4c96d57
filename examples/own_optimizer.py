"""Optimizers of your own: `optimizer._target_=examples.own_optimizer.Lion`, or `.Adafactor`.

An optimizer updates one tensor at a time. Its state is zeros at first, and stored with the weights. It must draw no
random numbers, and remember nothing in the object itself.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Lion:
    """Chen et al. 2023. Elementwise: each process calls it with the slice of each tensor that it has."""

    elementwise = True

    def __init__(self, betas: Sequence[float] = (0.9, 0.99)) -> None:
        self.betas = betas

    def state(self, shape: torch.Size) -> Mapping[str, Sequence[int]]:
        return {"mean": shape}

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], *, step: int, lr: float, weight_decay: float
    ) -> None:
        direction = state["mean"].lerp(grad, 1 - self.betas[0]).sign_()
        param.mul_(1 - lr * weight_decay).sub_(direction, alpha=lr)
        state["mean"].lerp_(grad, 1 - self.betas[1])


class Adafactor:
    """Shazeer and Stern 2018, without momentum: of a matrix it remembers two vectors, so it needs whole tensors."""

    elementwise = False

    def state(self, shape: torch.Size) -> Mapping[str, Sequence[int]]:
        return {"squares": shape} if len(shape) < 2 else {"rows": shape[:-1], "columns": [*shape[:-2], shape[-1]]}

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], *, step: int, lr: float, weight_decay: float
    ) -> None:
        squares, weight = grad.square() + 1e-30, (step + 1) ** -0.8
        if param.dim() < 2:
            mean = state["squares"].lerp_(squares, weight)
        else:
            rows, columns = (
                state[name].lerp_(squares.mean(dim), weight) for name, dim in (("rows", -1), ("columns", -2))
            )
            mean = (rows / rows.mean(-1, keepdim=True)).unsqueeze(-1) * columns.unsqueeze(-2)
        direction = grad * mean.rsqrt()
        direction /= direction.square().mean().sqrt().clamp(min=1)
        param.mul_(1 - lr * weight_decay).sub_(direction, alpha=lr)
