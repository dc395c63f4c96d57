"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): an optimizer for weight matrices.

`torch.optim.Muon` computes the same update (a test compares them), but has no way to skip a step that the device
decides on, and always multiplies in bfloat16, which many CPUs emulate slowly.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: the largest slope at 0 (Jordan et al.)
ITERATIONS = 5
SMALLEST_NORM = 1e-7


def orthogonal(matrix: Tensor) -> Tensor:
    """About U Vᵀ, if the matrix is U S Vᵀ: its singular values become 0.7 to 1.2. A Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    wide = x.T if len(x) > x.shape[1] else x  # the square matrices below are the smaller ones
    wide = wide / wide.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.T if len(x) > x.shape[1] else wide).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal, with Nesterov's look ahead and decoupled weight decay.

    The update of a matrix of a rows and b columns is scaled by 0.2 √max(a, b), so that its entries are as large as
    those of AdamW's, and learning rates and weight decay carry over (Liu et al. 2025, "Muon is Scalable for LLM
    Training"). Each matrix is updated by itself, whatever the others are. found_inf: as for torch's fused AdamW, a
    scalar on the device; if it is 1, weights and momentum stay as they are.
    """

    found_inf: Tensor

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        skip = self.found_inf > 0
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, skip, group["lr"], group["momentum"], group["weight_decay"])

    def _update(self, p: Tensor, gradient: Tensor, skip: Tensor, lr: float, momentum: float, decay: float) -> None:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        mean = state["momentum_buffer"].lerp(gradient, 1 - momentum)
        step = orthogonal(gradient.lerp(mean, momentum)) * (-lr * 0.2 * math.sqrt(max(p.shape)))
        p.copy_(torch.where(skip, p, p * (1 - lr * decay) + step))
        state["momentum_buffer"].copy_(torch.where(skip, state["momentum_buffer"], mean))
