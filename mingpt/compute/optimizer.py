"""Parameter groups, the optimizers, their schedule, and the update from a reduced gradient.

All state that the update keeps between steps is a tensor in `Update.state()`; the learning rate is a function of the
step. Clipping, skipping and the fp16 loss scale are computed on the device from the reduced gradient. So all processes
decide alike without communication, and without waiting for the device.
"""

import math
from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from mingpt.compute.groups import Role, make_optimizers
from mingpt.compute.guard import Guard
from mingpt.compute.muon import Muon
from mingpt.config.schema import Health, Optimizer, Schedule

Layout = tuple[torch.Size, torch.dtype]
ALIGNMENT = 16  # bytes
SLOTS: dict[type, set[str]] = {torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"}, Muon: {"momentum_buffer"}}
GROW_AFTER = 2000  # finite fp16 steps until the loss scale doubles, as in torch.amp.GradScaler


def state_layout(
    named_parameters: Iterable[tuple[str, nn.Parameter]], fp16: bool, of_muon: Container[str] = ()
) -> dict[str, Layout]:
    """Names, shapes and dtypes of `Update.state()` after a step. of_muon: the parameters that Muon updates."""
    scalar = torch.Size(), torch.float32
    out: dict[str, Layout] = {"loss_scale": scalar, "loss_scale.finite_steps": scalar} if fp16 else {}
    for name, p in named_parameters:
        if name in of_muon:
            out[f"{name}.momentum_buffer"] = p.shape, p.dtype
            continue
        out |= {f"{name}.step": scalar, f"{name}.exp_avg": (p.shape, p.dtype), f"{name}.exp_avg_sq": (p.shape, p.dtype)}
    return out


def misfits(expected: Mapping[str, Layout], tensors: Mapping[str, Tensor]) -> list[str]:
    """One line for each tensor whose name, shape or dtype is not as expected."""

    def text(shape: Sequence[int], dtype: torch.dtype) -> str:
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"

    found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    return [
        *(f"{name} is missing" for name in sorted(expected.keys() - found)),
        *(f"{name} is unknown" for name in sorted(found.keys() - expected)),
        *(
            f"{name} is {text(*found[name])} in place of {text(*layout)}"
            for name, layout in sorted(expected.items())
            if name in found and found[name] != layout
        ),
    ]


def aligned(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors, with copies of those that do not start at a multiple of ALIGNMENT bytes.

    On CUDA, torch's norm of such a tensor adds in another order. Gradients are views into DDP's buckets, and DDP lays
    its buckets out anew after an attempt's first step, so a gradient's address depends on when the attempt began.
    """
    return [t.clone() if t.data_ptr() % ALIGNMENT else t for t in tensors]


def batch_factor(config: Optimizer, global_size: int) -> float:
    """The factor of the learning rate for another batch size than config.reference_batch.

    linear: Goyal et al. 2017; sqrt: Krizhevsky 2014, the usual choice for Adam.
    """
    if config.lr_scaling == "none":
        return 1.0
    ratio = global_size / config.reference_batch
    return ratio if config.lr_scaling == "linear" else math.sqrt(ratio)


def schedule_factor(config: Schedule, step: int) -> float:
    """The learning rate of `step`, counted from 0, as a share of its peak."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.kind == "constant":
        return 1.0
    begin = max(config.warmup_steps, config.stable_until)
    first = 1 if config.kind == "wsd" else 0  # each step of its decay is below the peak, and none is at 0
    done = min(1.0, max(0, step + first - begin) / max(1, config.decay_steps + first - begin))
    falling = 0.5 * (1 + math.cos(math.pi * done)) if config.kind == "cosine" else 1 - done
    return config.min_ratio + (1 - config.min_ratio) * falling


class Update:
    """One optimizer step from the summed gradients in .grad: unscale, clip, skip if the guard refuses it, update.

    `scaled` divides the loss, a sum over tokens, by `tokens_per_microbatch`, so that fp16 gradients stay in range;
    `__call__` multiplies the gradients by it again.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: Optimizer,
        schedule: Schedule,
        *,
        roles: Mapping[str, Role],
        global_size: int,
        tokens_per_microbatch: int,
        fp16: bool,
        device: torch.device,
        health: Health,
    ) -> None:
        self.named = sorted(named_parameters)
        self.optimizers = make_optimizers(self.named, config, roles)
        self.config, self.schedule = config, schedule
        factor = batch_factor(config, global_size)
        self.peak_lr = config.lr * factor
        self.groups = [(g, g["lr"] * factor) for optimizer in self.optimizers for g in optimizer.param_groups]
        self.of = {p: optimizer for optimizer in self.optimizers for g in optimizer.param_groups for p in g["params"]}
        self.tokens_per_microbatch = tokens_per_microbatch
        # 2^16 at the start, always a power of two; 1 without fp16.
        self.loss_scale = torch.tensor(2.0**16 if fp16 else 1.0, device=device)
        self.finite_steps = torch.zeros((), device=device) if fp16 else None
        self.guard = Guard(health, device)

    def lr(self, step: int) -> float:
        return self.peak_lr * schedule_factor(self.schedule, step)

    def zero_grad(self) -> None:
        for _, p in self.named:
            p.grad = None

    def scaled(self, loss_sum: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss_sum * (self.loss_scale / self.tokens_per_microbatch)

    def __call__(self, step: int, losses: Tensor, tokens: Tensor) -> Tensor:
        """Update the weights, unless the guard refuses the step. Returns the gradient's norm before clipping.

        losses: (M,) float64, the microbatches' sums. tokens: the number of targets in the step. Both on the device.
        """
        gradients = [p.grad for _, p in self.named if p.grad is not None]
        unscale = self.tokens_per_microbatch / (self.loss_scale * tokens.float().clamp(min=1))
        # The norm of the parameters' norms, in a fixed order, so that its bits do not depend on the world.
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(aligned(gradients)))) * unscale
        clip = (self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0) if self.config.clip_norm else 1.0
        torch._foreach_mul_(gradients, unscale * clip)
        refused = self.guard.refuses(losses.sum() / tokens.clamp(min=1), norm).float()
        for group, peak in self.groups:
            group["lr"] = peak * schedule_factor(self.schedule, step)
        for optimizer in self.optimizers:
            # If found_inf is 1, the fused kernel changes neither weights nor moments nor step count.
            # torch.amp.GradScaler skips steps in the same way, without waiting for the device.
            optimizer.found_inf = refused  # type: ignore[attr-defined]
            optimizer.step()
        if self.finite_steps is not None:
            self._adapt_loss_scale(self.finite_steps, (~torch.isfinite(norm)).float())
        return norm

    def skipped_in_a_row(self) -> int:
        """The number of steps skipped in a row up to the last one, 0 if that was not. Waits for the device."""
        return int(self.guard.skips)

    def _adapt_loss_scale(self, finite_steps: Tensor, not_finite: Tensor) -> None:
        finite_steps.add_(1).mul_(1 - not_finite)
        grow = finite_steps >= GROW_AFTER
        self.loss_scale.mul_(torch.where(not_finite > 0, 0.5, torch.where(grow, 2.0, 1.0)))
        self.loss_scale.clamp_(min=1.0)  # from 0 it could never double again
        finite_steps.mul_(~grow)

    def state(self) -> dict[str, Tensor]:
        """All state of the update by `<parameter>.<slot>`; the tensors themselves, not copies."""
        out: dict[str, Tensor] = {}
        for name, p in self.named:
            out |= {f"{name}.{slot}": value for slot, value in self.of[p].state.get(p, {}).items()}
        if self.finite_steps is not None:
            out |= {"loss_scale": self.loss_scale, "loss_scale.finite_steps": self.finite_steps}
        return out | self.guard.state()

    def load(self, state: dict[str, Tensor]) -> None:
        """Load what `state()` has returned, from any device. The caller has checked it with `misfits`.

        What another optimizer remembered of a parameter (optimizer.name may change) is left out: it begins anew.
        """
        parameters = dict(self.named)
        for key, value in state.items():
            name, _, slot = key.rpartition(".")
            if (p := parameters.get(name)) is not None and slot in SLOTS[type(self.of[p])]:
                # Moments get the parameter's memory layout, as the fused kernel expects.
                like = value if slot == "step" else p.detach()
                self.of[p].state[p][slot] = torch.empty_like(like, device=p.device).copy_(value)
        if self.finite_steps is not None and "loss_scale" in state:
            self.loss_scale.copy_(state["loss_scale"])
            self.finite_steps.copy_(state["loss_scale.finite_steps"])
        self.guard.load(state)
