"""Parameter groups, the optimizer, its schedule, and the update from a reduced gradient.

All that the update rule remembers between steps is a tensor in `Update.state()`; the learning rate is a function of the
step. Every decision (clip, skip, fp16 scale) is made from the reduced gradient, on the device, so that all processes
decide alike without asking each other and without waiting for the device.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from mingpt.compute.guard import Guard
from mingpt.config.schema import Health, Optimizer, Schedule

Layout = tuple[torch.Size, torch.dtype]
ALIGNMENT = 16  # bytes
GROW_AFTER = 2000  # finite fp16 steps before the loss scale doubles, torch.amp.GradScaler's figure


def state_layout(named_parameters: Iterable[tuple[str, nn.Parameter]], fp16: bool) -> dict[str, Layout]:
    """What `Update.state()` holds after a step."""
    scalar = torch.Size(), torch.float32
    out: dict[str, Layout] = {"loss_scale": scalar, "loss_scale.finite_steps": scalar} if fp16 else {}
    for name, p in named_parameters:
        out |= {f"{name}.step": scalar, f"{name}.exp_avg": (p.shape, p.dtype), f"{name}.exp_avg_sq": (p.shape, p.dtype)}
    return out


def misfits(expected: Mapping[str, Layout], tensors: Mapping[str, Tensor]) -> list[str]:
    """What is wrong with tensors that are to have these names, shapes and dtypes."""

    def described(shape: Sequence[int], dtype: torch.dtype) -> str:
        return f"{str(dtype).removeprefix('torch.')} {list(shape)}"

    found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    return [
        *(f"{name} is missing" for name in sorted(expected.keys() - found)),
        *(f"{name} is unknown" for name in sorted(found.keys() - expected)),
        *(
            f"{name} is {described(*found[name])} in place of {described(*layout)}"
            for name, layout in sorted(expected.items())
            if name in found and found[name] != layout
        ),
    ]


def aligned(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors; those that do not start at a multiple of ALIGNMENT bytes are copied.

    On CUDA, torch's norms add such tensors in another order. Gradients are views into DDP's buckets: where they start
    depends on how many steps the attempt has taken.
    """
    return [t.clone() if t.data_ptr() % ALIGNMENT else t for t in tensors]


def make_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]], config: Optimizer) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) in its fused form; matrices decay, biases and norms don't."""
    named = sorted(named_parameters)
    matrices = [p for _, p in named if p.dim() >= 2]
    others = [p for _, p in named if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def batch_factor(config: Optimizer, global_size: int) -> float:
    """What the learning rate is multiplied by for a batch other than the one it was tuned for.

    linear: Goyal et al. 2017; sqrt: Krizhevsky 2014, the usual choice for Adam.
    """
    ratio = global_size / config.reference_batch
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_scaling]


def schedule_factor(config: Schedule, step: int) -> float:
    """The learning rate of `step` (0 is the first) as a share of its peak."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.kind == "constant":
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, config.decay_steps - config.warmup_steps))
    falling = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done}[config.kind]
    return config.min_ratio + (1 - config.min_ratio) * falling


class Update:
    """One optimizer step from the gradient sum in every .grad: unscale, clip, skip if the guard refuses it, step.

    Before backward, losses (sums over tokens) are divided by `tokens_per_microbatch`, so that fp16 gradients stay in
    range. `__call__` multiplies by it again.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: Optimizer,
        schedule: Schedule,
        *,
        global_size: int,
        tokens_per_microbatch: int,
        fp16: bool,
        device: torch.device,
        health: Health,
    ) -> None:
        self.named = sorted(named_parameters)
        self.optimizer = make_optimizer(self.named, config)
        self.config, self.schedule = config, schedule
        self.peak_lr = config.lr * batch_factor(config, global_size)
        self.tokens_per_microbatch = tokens_per_microbatch
        # The scale starts at 2^16 and moves by powers of two; 1 where the precision needs none.
        self.loss_scale = torch.tensor(2.0**16 if fp16 else 1.0, device=device)
        self.finite_steps = torch.zeros((), device=device) if fp16 else None
        self.guard = Guard(health, device)

    def lr(self, step: int) -> float:
        return self.peak_lr * schedule_factor(self.schedule, step)

    def scaled(self, loss_sum: Tensor) -> Tensor:
        """What to call backward on."""
        return loss_sum * (self.loss_scale / self.tokens_per_microbatch)

    def __call__(self, step: int, losses: Tensor, tokens: Tensor) -> Tensor:
        """Update the weights unless the guard refuses the step; returns the gradient's norm before clipping.

        Both on the device: losses, (M,) float64, the microbatches' sums; tokens, how many targets they are summed over.
        """
        gradients = [p.grad for _, p in self.named if p.grad is not None]
        unscale = self.tokens_per_microbatch / (self.loss_scale * tokens.float().clamp(min=1))
        # Norm of the norms of fixed chunks (the parameters) in a fixed order: nothing here knows the world.
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(aligned(gradients)))) * unscale
        clip = (self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0) if self.config.clip_norm else 1.0
        torch._foreach_mul_(gradients, unscale * clip)
        refused = self.guard.refuses(losses.sum() / tokens.clamp(min=1), norm).float()
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(step)
        # The fused kernel leaves weights, moments and step count alone if found_inf is 1: the way in which
        # torch.amp.GradScaler skips a step without waiting for the device.
        self.optimizer.found_inf = refused  # type: ignore[attr-defined]
        self.optimizer.step()
        if self.finite_steps is not None:
            self._adapt_loss_scale(self.finite_steps, (~torch.isfinite(norm)).float())
        return norm

    def skipped_in_a_row(self) -> int:
        """How many steps up to the last one were skipped. Waits for the device."""
        return int(self.guard.skips)

    def _adapt_loss_scale(self, finite_steps: Tensor, not_finite: Tensor) -> None:
        finite_steps.add_(1).mul_(1 - not_finite)
        grow = finite_steps >= GROW_AFTER
        self.loss_scale.mul_(torch.where(not_finite > 0, 0.5, torch.where(grow, 2.0, 1.0)))
        self.loss_scale.clamp_(min=1.0)  # halved to 0, it would never come back
        finite_steps.mul_(~grow)

    def state(self) -> dict[str, Tensor]:
        """All that the update rule remembers, by `<parameter>.<slot>`; the tensors themselves, not copies."""
        out: dict[str, Tensor] = {}
        for name, p in self.named:
            out |= {f"{name}.{slot}": value for slot, value in self.optimizer.state.get(p, {}).items()}
        if self.finite_steps is not None:
            out |= {"loss_scale": self.loss_scale, "loss_scale.finite_steps": self.finite_steps}
        return out | self.guard.state()

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over a state that `state()` gave, on whatever device it lies; `misfits` has checked it."""
        parameters = dict(self.named)
        for key, value in state.items():
            name, _, slot = key.rpartition(".")
            if (p := parameters.get(name)) is not None:
                # Moments in the order of the parameter's memory, as the fused kernel expects them.
                like = value if slot == "step" else p.detach()
                self.optimizer.state[p][slot] = torch.empty_like(like, device=p.device).copy_(value)
        if self.finite_steps is not None and "loss_scale" in state:
            self.loss_scale.copy_(state["loss_scale"])
            self.finite_steps.copy_(state["loss_scale.finite_steps"])
        self.guard.load(state)
