"""The optimizer: the schedule, and the update from a reduced gradient. Which parameter follows which rule: rules.py.

All state that the update keeps between steps is a tensor in `Update.state()`; the learning rate is a function of the
step. Clipping, skipping and the fp16 loss scale are computed on the device from the reduced gradient. So all processes
decide alike without communication, and without waiting for the device.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw  # not AdamW, whose first call imports torch's compiler: 1.2 s of CPU time

from mingpt.compute.buckets import CHUNK, Bucket, Sliced, Slot
from mingpt.compute.exchange import Packing, WeightGather
from mingpt.compute.guard import Guard
from mingpt.compute.muon import Muon
from mingpt.compute.rules import Rule
from mingpt.compute.tree import sum_on_device
from mingpt.config.schema import Health, Optimizer, OwnSchedule, Schedule
from mingpt.world.world import World, all_gather

INITIAL_SCALE = 2.0**16  # of the fp16 loss; always a power of two, so that scaling rounds nothing
GROW_AFTER = 2000  # finite fp16 steps until the loss scale doubles, as in torch.amp.GradScaler

# By rule, a row for each piece: weights, gradient, both moments, the count of steps.
Pieces = defaultdict[Rule, list[tuple[Tensor, ...]]]


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
    if isinstance(config, OwnSchedule):
        return config.share(step)
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.kind == "constant":
        return 1.0
    begin = max(config.warmup_steps, config.stable_until)
    first = 1 if config.kind == "wsd" else 0  # each step of its decay is below the peak, and none is at 0
    done = min(1.0, max(0, step + first - begin) / max(1, config.decay_steps + first - begin))
    falling = 0.5 * (1 + math.cos(math.pi * done)) if config.kind == "cosine" else 1 - done
    return config.min_ratio + (1 - config.min_ratio) * falling


class Method(Protocol):
    """Updates all parameters, in place of AdamW and Muon: compute/own.py."""

    def step(self, sums: Sequence[Tensor], skip: Tensor, step: int, factor: float) -> None: ...
    def state(self) -> dict[str, Tensor | Sliced]: ...
    def load(self, state: Mapping[str, Tensor]) -> None: ...
    def reset(self) -> None: ...
    def shapes(self, shape: torch.Size) -> Mapping[str, torch.Size]: ...


class Update:
    """One optimizer step from the summed gradients: unscale, clip, skip if the guard refuses it, update.

    `scaled` divides the loss, a sum over tokens, by `tokens_per_microbatch`, so that fp16 gradients stay in range;
    `__call__` multiplies the gradients by it again. Each process updates the slice of each bucket that it owns; then
    all gather the weights.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        rules: Mapping[str, Rule],
        config: Optimizer,
        schedule: Schedule,
        world: World,
        *,
        global_size: int,
        tokens_per_microbatch: int,
        fp16: bool,
        health: Health,
        in_16_bits: Mapping[Bucket, Packing] | None = None,
        own: Method | None = None,
    ) -> None:
        """rules: by parameter name. A bucket's parameters all belong to Muon, or none does. own: in place of both."""
        self.buckets, self.rules, self.config, self.schedule, self.world = buckets, rules, config, schedule, world
        self.factor = batch_factor(config, global_size)
        self.tokens_per_microbatch = tokens_per_microbatch
        device = world.device
        self.loss_scale = torch.tensor(INITIAL_SCALE if fp16 else 1.0, device=device)
        self.finite_steps = torch.zeros((), device=device) if fp16 else None
        self.guard = Guard(health, device)
        self.weight_gather = WeightGather(world, in_16_bits or {})
        self.own = own
        # By parameter: its bucket's index, and its place there.
        self.slots = dict[str, tuple[int, Slot]]()
        # The indices of Muon's buckets.
        self.of_muon = list[int]()
        # By kind, then by bucket's index: what is remembered of this process's slice. See also `ema_slices`.
        self.moments: dict[str, dict[int, Tensor]] = {"momentum_buffer": {}, "exp_avg": {}, "exp_avg_sq": {}}
        counted = list[str]()
        for i, bucket in enumerate(buckets):
            names = [slot.name for slot in bucket.slots]
            for slot in bucket.slots:
                self.slots[slot.name] = i, slot
            if own:
                continue
            if rules[names[0]].muon:
                self.of_muon.append(i)
                self.moments["momentum_buffer"][i] = torch.zeros_like(bucket.local)
            else:
                counted += names
                self.moments["exp_avg"][i] = torch.zeros_like(bucket.local)
                self.moments["exp_avg_sq"][i] = torch.zeros_like(bucket.local)
        self.muon = self._make_muon() if self.of_muon else None
        # AdamW's counts of steps: of all parameters, also those of which this process's slice has nothing, since each
        # snapshot has them all. In one tensor, so that one addition counts a step.
        self.steps = torch.zeros(len(counted), device=device)
        self.step_of = dict(zip(sorted(counted), self.steps.unbind(), strict=True))

    def _make_muon(self) -> Muon:
        buckets = [self.buckets[i] for i in self.of_muon]
        muon_rules = {self.rules[slot.name] for bucket in buckets for slot in bucket.slots}
        if len(muon_rules) != 1:  # one call with one rate updates them all
            raise ValueError(f"Muon's parameters have {len(muon_rules)} rules: give them one (compute/rules.py)")
        return Muon(buckets, muon_rules.pop(), self.config.momentum, self.world)

    def lr(self, step: int) -> float:
        return self.config.lr * self.factor * schedule_factor(self.schedule, step)

    def scaled(self, loss_sum: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss_sum * (self.loss_scale / self.tokens_per_microbatch)

    @torch.no_grad()
    def __call__(self, step: int, losses: Tensor, tokens: Tensor, sums: Sequence[Tensor]) -> Tensor:
        """Update the weights, unless the guard refuses the step. Returns the gradient's norm before clipping.

        losses: (M,) float64, the microbatches' sums. tokens: the number of targets in the step. Both on the device.
        sums: Reduction.sums; they are unscaled and clipped in place.
        """
        # A step without any target has gradients of zeros. Without the clamp they would be multiplied by infinity, and
        # the step be skipped as not finite.
        unscale = self.tokens_per_microbatch / (self.loss_scale * tokens.float().clamp(min=1))
        norm = self.norm(sums) * unscale
        # 1e-6 as in torch's clip_grad_norm_. A norm that is not finite makes the factor 0 or NaN: the guard refuses it.
        clip = (self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0) if self.config.clip_norm else 1.0
        torch._foreach_mul_(list(sums), unscale * clip)
        loss = sum_on_device(losses) / tokens.clamp(min=1)  # the very number that the log shows
        refused = self.guard.refuses(loss, norm).float()
        # Before any weight changes: the mean begins with the weights that the first step finds.
        ema = self.ema_slices()
        factor = self.factor * schedule_factor(self.schedule, step)
        if self.muon:
            momenta = list(self.moments["momentum_buffer"].values())
            self.muon.step(momenta, [sums[i] for i in self.of_muon], refused > 0, factor)
        if self.own:
            self.own.step(sums, refused > 0, step, factor)
        # Copies: the kernel counts up what it is given, which are the parameters that this process's slice touches.
        counts = dict(zip(self.step_of, self.steps.clone().unbind(), strict=True))
        by_rule = Pieces(list)
        for i, bucket in enumerate(self.buckets):
            if i in self.moments["exp_avg"]:
                self._collect(i, sums[i], counts, by_rule)
            if bucket.shard:  # its new weights travel while the next bucket is updated
                self._adamw(by_rule, factor, refused)
                self.weight_gather.start(bucket)
        # What does not travel: one call of the kernel for each rule. GPT-2 has 17 buckets and two rules.
        self._adamw(by_rule, factor, refused)
        self.steps.add_(1 - refused)
        self.weight_gather.finish()
        for i, mean in ema.items():
            # Two operations that round once each. A lerp may be fused in one, with other bits where a slice's elements
            # don't fill a vector.
            new = (mean * self.config.ema).add_(self.buckets[i].local * (1 - self.config.ema))
            mean.copy_(torch.where(refused > 0, mean, new))
        if self.finite_steps is not None:
            self._adapt_loss_scale(self.finite_steps, (~torch.isfinite(norm)).float())
        return norm

    def ema_slices(self) -> dict[int, Tensor]:
        """Give this process's slice of the mean of the weights, by bucket. It begins with those of the first call."""
        if self.config.ema and "ema" not in self.moments:
            self.moments["ema"] = {i: bucket.local.clone() for i, bucket in enumerate(self.buckets)}
        return self.moments.get("ema", {})

    def norm(self, sums: Sequence[Tensor]) -> Tensor:
        """The norm of the whole gradient, added chunk by chunk in one order: the same bits in any world."""
        squares = [sums_of_squares(flat) for flat in sums]
        if self.buckets[0].shard:
            lengths = [len(of_chunks) for of_chunks in squares]
            local = torch.cat(squares).to(self.world.comm_device)
            gathered = local.new_empty(self.world.size * len(local))
            all_gather(gathered, local)
            by_rank = gathered.to(sums[0].device).view(self.world.size, -1)
            squares = [part.flatten() for part in by_rank.split(lengths, 1)]
        # Without the chunks that hold nothing but padding: their number depends on the world, and with it how
        # pairwise_sum would cut the rest into halves.
        chunks = [of_chunks[: bucket.chunks] for of_chunks, bucket in zip(squares, self.buckets, strict=True)]
        return pairwise_sum(torch.cat(chunks).double()[None])[0].sqrt().float()

    def _collect(self, i: int, gradient: Tensor, counts: Mapping[str, Tensor], by_rule: Pieces) -> None:
        """Add this process's pieces of a bucket, and what AdamW remembers of them, to those of their rules."""
        bucket = self.buckets[i]
        for slot, part in bucket.pieces(bucket.owned):
            first, second = self.moments["exp_avg"][i][part], self.moments["exp_avg_sq"][i][part]
            row = bucket.local[part], gradient[part], first, second, counts[slot.name]
            by_rule[self.rules[slot.name]].append(row)

    def _adamw(self, by_rule: Pieces, factor: float, refused: Tensor) -> None:
        """Take all pieces out, and call torch's fused kernel for those of each rule.

        It changes neither weights nor moments where `refused` is 1, without a wait. An element's bits depend on no
        other one, so they are the same in whichever call it is.
        """
        while by_rule:
            rule, rows = by_rule.popitem()
            weights, gradients, firsts, seconds, steps = map(list, zip(*rows, strict=True))
            adamw(
                weights, gradients, firsts, seconds, [], steps, fused=True, found_inf=refused, amsgrad=False,
                beta1=self.config.beta1, beta2=self.config.beta2, lr=rule.lr * factor, eps=self.config.eps,
                weight_decay=rule.weight_decay, maximize=False,
            )  # fmt: skip

    def skipped_in_a_row(self) -> int:
        """The number of steps skipped in a row up to the last one, 0 if that was not. Waits for the device."""
        return int(self.guard.skips)

    def _adapt_loss_scale(self, finite_steps: Tensor, not_finite: Tensor) -> None:
        finite_steps.add_(1).mul_(1 - not_finite)
        grow = finite_steps >= GROW_AFTER
        self.loss_scale.mul_(torch.where(not_finite > 0, 0.5, torch.where(grow, 2.0, 1.0)))
        self.loss_scale.clamp_(min=1.0)  # from 0 it could never double again
        finite_steps.mul_(~grow)

    def state(self) -> dict[str, Tensor | Sliced]:
        """All state of the update by `<parameter>.<kind>`; the tensors themselves, not copies."""
        self.ema_slices()
        out: dict[str, Tensor | Sliced] = {f"{name}.step": count for name, count in self.step_of.items()}
        for name, (i, slot) in self.slots.items():
            for kind, flats in self.moments.items():
                if i in flats:
                    out[f"{name}.{kind}"] = self.buckets[i].tensor(flats[i], slot)
        if self.own:
            out |= self.own.state()
        if self.finite_steps is not None:
            out |= {"loss_scale": self.loss_scale, "loss_scale.finite_steps": self.finite_steps}
        return out | self.guard.state()

    def reset(self) -> None:
        """Forget all that was loaded."""
        if self.own:
            self.own.reset()
        self.moments.pop("ema", None)
        self.steps.zero_()
        for flats in self.moments.values():
            for flat in flats.values():
                flat.zero_()
        if self.finite_steps is not None:
            self.loss_scale.fill_(INITIAL_SCALE)
            self.finite_steps.zero_()
        self.guard = Guard(self.guard.config, self.world.device)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state()` has returned, whole, or a part of it, after the weights. `misfits` has checked it.

        What another optimizer remembered of a parameter (optimizer.name may change) is left out: it begins anew.
        """
        if self.own:
            self.own.load(state)
        for key, value in state.items():
            name, _, kind = key.rpartition(".")
            if kind == "ema":
                self.ema_slices()  # of the loaded weights, where the snapshot has no mean of a parameter
            if kind == "step" and name in self.step_of:
                self.step_of[name].copy_(value)
            elif name in self.slots:
                i, slot = self.slots[name]
                if i in self.moments.get(kind, {}):
                    self.buckets[i].load(self.moments[kind][i], slot, value)
        if self.finite_steps is not None:
            self.loss_scale.copy_(state.get("loss_scale", self.loss_scale))
            self.finite_steps.copy_(state.get("loss_scale.finite_steps", self.finite_steps))
        self.guard.load(state)


def sums_of_squares(flat: Tensor) -> Tensor:
    """Each chunk's sum of squares: (n,) to (n / CHUNK,)."""
    # On a CPU, as much at a time as its cache holds: a third of the time. A chunk's sum is the same either way.
    rows = 32 * CHUNK if flat.is_cpu else len(flat)
    return torch.cat([pairwise_sum(part.view(-1, CHUNK).float().square()) for part in flat.split(rows)])


def pairwise_sum(rows: Tensor) -> Tensor:
    """The sum of each row: (rows, n) to (rows,).

    By adding the second half to the first one, again and again. So the bits depend on no thread, no vector width, no
    alignment and no number of rows, which torch's own sums and norms on CUDA do not promise.
    """
    n = 1 << (rows.shape[1] - 1).bit_length()
    rows = torch.nn.functional.pad(rows, (0, n - rows.shape[1])) if n > rows.shape[1] else rows
    while n > 1:
        n //= 2
        rows = rows[:, :n] + rows[:, n:]
    return rows[:, 0]
