"""An optimizer of the user's own: what `optimizer._target_` names, and how its update is called.

One that is elementwise is called with this process's slices, as AdamW is. Any other one is called with whole tensors,
by their owners, as Muon is. Both have the same bits in any world, if the optimizer is what it says: it is tried out.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mingpt.compute.buckets import CHUNK, Bucket, Sliced
from mingpt.compute.layout import MARK
from mingpt.compute.muon import Owners
from mingpt.compute.rules import Rule
from mingpt.config import plugin
from mingpt.config.section import Own
from mingpt.errors import UserError
from mingpt.world.world import World

TRIED, CUT = 24 * CHUNK, 7 * CHUNK  # more than torch gives to one thread

FORM = "write update(param, grad, state, *, step, lr, weight_decay) and state(shape) as in examples/own_optimizer.py"
STATE = "state(shape) gives the shape of each tensor that is remembered, by name"
WHOLE = "set elementwise = False, and it is called with whole tensors"


class OwnOptimizer(Protocol):
    """What such a class has. elementwise: a new element follows from the old one, its gradient and its state alone."""

    elementwise: bool

    def state(self, shape: torch.Size) -> Mapping[str, Sequence[int]]:
        """Names and shapes of what is remembered of a tensor of this shape; zeros at first. Elementwise: its shape."""

    def update(
        self, param: Tensor, grad: Tensor, state: dict[str, Tensor], *, step: int, lr: float, weight_decay: float
    ) -> None:
        """Change param and state in place. step: of the run, counted from 0. Remember nothing in the object itself.

        grad: clipped. param: any length, flat, if elementwise. weight_decay: 0 for biases and norms.
        """


class OwnUpdate:
    """Calls it with copies, which are taken over unless the step is skipped: the device decides that."""

    def __init__(self, settings: Own, buckets: Sequence[Bucket], rules: Mapping[str, Rule], world: World) -> None:
        """Raises UserError, with the reason, if it can neither be called with slices nor with whole tensors."""
        self.optimizer: OwnOptimizer = plugin.call("optimizer", settings)
        self.shown = f"optimizer._target_={settings.target}"
        self.buckets, self.rules, self.world = buckets, rules, world
        self.owners = Owners(buckets, torch.Size.numel, world)
        self._try_out()
        # By parameter and name: what is remembered of its piece in this process's slice, or of the whole one.
        self.held = {slot.name: dict[str, Tensor]() for _, slot in self.owners.slots}
        self.stored = dict[str, Sliced]()
        pieces = {slot.name: part for bucket in buckets for slot, part in bucket.pieces(bucket.owned)}
        for k, (i, slot) in enumerate(self.owners.slots):
            for name, shape in self.shapes(slot.parameter.shape).items():
                count, stride, ranges = shape.numel(), slot.parameter.stride(), buckets[i].ranges(slot)
                piece = pieces.get(slot.name, slice(0, 0))
                flat = buckets[i].weights.new_zeros(piece.stop - piece.start)
                if not self.optimizer.elementwise:
                    flat, owner = flat.new_zeros(count * (k in self.owners.owned)), self.owners.owners[k]
                    stride = flat.new_empty(shape).stride()
                    ranges = tuple(range(count if rank == owner else 0) for rank in range(world.size))
                if not self.owners.shared:
                    ranges = (range(count),) * world.size
                self.held[slot.name][name] = flat.view(shape) if not self.optimizer.elementwise and len(flat) else flat
                local = flat[: len(ranges[world.rank])]
                self.stored[slot.name + MARK + name] = Sliced(shape, stride, flat.dtype, ranges, local)

    def shapes(self, shape: torch.Size) -> dict[str, torch.Size]:
        """Of what is remembered of a tensor of this shape, by name. Raises UserError if it does not say so."""
        shown = f"{self.shown}: state({list(shape)})"
        try:
            found = {name: torch.Size(of) for name, of in self.optimizer.state(shape).items()}
        except (Exception, SystemExit) as error:
            raise UserError(f"{shown} failed: {plugin.describe(error, type(self.optimizer))}: {STATE}") from error
        if self.optimizer.elementwise and {shape, *found.values()} != {shape}:
            raise UserError(f"{shown} has another shape than the tensor, which only whole ones may: {WHOLE}")
        return found

    def step(self, sums: Sequence[Tensor], skip: Tensor, step: int, factor: float) -> None:
        """sums: of each bucket the slice that this process owns. skip: a bool on the device. factor: of a rule's lr."""

        def updated(name: str, p: Tensor, gradient: Tensor) -> Tensor:
            rule = self.rules[name]
            return self._update(p, gradient, self.held[name], skip, step, rule.lr * factor, rule.weight_decay)

        weights = [bucket.local for bucket in self.buckets]
        if self.optimizer.elementwise:
            for bucket, local, flat in zip(self.buckets, weights, sums, strict=True):
                for slot, part in bucket.pieces(bucket.owned):
                    local[part] = updated(slot.name, local[part], flat[part])
            return
        gradients = self.owners.gather_owned(sums)
        whole = self.owners.gather_owned(weights).items()
        # One after the other: the memory of one tensor's copies, not of all.
        new = ((k, updated(self.owners.slots[k][1].name, p, gradients[k])) for k, p in whole)
        self.owners.scatter_owned(new, weights)

    def _update(
        self, p: Tensor, gradient: Tensor, state: dict[str, Tensor], skip: Tensor, step: int, lr: float, decay: float
    ) -> Tensor:
        """The new value of p; the state is changed in place. If `skip` is true, both stay as they are."""
        new, after = p.clone(), {name: old.clone() for name, old in state.items()}
        # A copy of the gradient, too: on a GPU, bits of a sum may depend on where a tensor lies.
        self.optimizer.update(new, gradient.clone(), after, step=step, lr=lr, weight_decay=decay)
        for name, old in state.items():
            old.copy_(torch.where(skip, old, after[name]))
        return torch.where(skip, p, new)

    def state(self) -> dict[str, Tensor | Sliced]:
        """What snapshots hold of it; the tensors themselves, not copies."""
        shared = self.owners.shared
        return {key: t if shared else t.local.as_strided(t.shape, t.stride) for key, t in self.stored.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave, whole, or a part of it. What is of another optimizer is left out."""
        for key, value in state.items():
            t = self.stored.get(key)
            if t and t.shape == value.shape:
                flat = value.new_empty_strided(t.shape, t.stride).copy_(value).as_strided((value.numel(),), (1,))
                mine = t.ranges[self.world.rank]
                t.local.copy_(flat[mine.start : mine.stop])

    def reset(self) -> None:
        """Forget all that was loaded."""
        for t in self.stored.values():
            t.local.zero_()

    def _try_out(self) -> None:
        """Call it for two steps, with random numbers. Raises UserError if its bits depend on more than they may."""
        elementwise = getattr(self.optimizer, "elementwise", None)
        if not isinstance(elementwise, bool):
            raise UserError(f"{self.shown} has no `elementwise`, which is True or False: {FORM}")
        parameters = sorted((slot.parameter for _, slot in self.owners.slots), key=Tensor.numel, reverse=True)
        # Of whole tensors, the smallest one of each number of dimensions.
        shapes = [torch.Size([TRIED])] if elementwise else {p.dim(): p.shape for p in parameters}.values()
        numbers = torch.Generator().manual_seed(1)
        for shape in shapes:
            tensors = [torch.randn(shape, generator=numbers).to(self.world.device) for _ in range(3)]
            found = self._two_steps(*tensors)
            if other := _differing(found, self._two_steps(*tensors)):
                raise UserError(
                    f"{self.shown}: update gives other bits for {other} when it is called again: it must draw no "
                    "random numbers, and remember nothing outside of its state"
                )
            if elementwise:
                parts = [self._two_steps(*(t[cut] for t in tensors)) for cut in (slice(CUT), slice(CUT, None))]
                if other := _differing(found, {name: torch.cat([part[name] for part in parts]) for name in found}):
                    raise UserError(
                        f"{self.shown} says that it is elementwise, but update gives other bits for {other} of a "
                        f"tensor's two parts than of the whole: {WHOLE}"
                    )

    def _two_steps(self, p: Tensor, *gradients: Tensor) -> dict[str, Tensor]:
        """The tensor after these steps, and its state."""
        state = {name: p.new_zeros(shape) for name, shape in self.shapes(p.shape).items()}
        try:
            for step, gradient in enumerate(gradients):
                p = self._update(p, gradient, state, torch.zeros_like(p).bool().any(), step, 1e-3, 0.1)
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            what = plugin.describe(error, type(self.optimizer))
            raise UserError(f"{self.shown}: update of a tensor {list(p.shape)} failed: {what}: {FORM}") from error
        return {"param": p, **state}


def _differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> str:
    """The names of the tensors whose bits differ."""
    return ", ".join(n for n in a if not torch.equal(a[n].view(torch.int32), b[n].view(torch.int32)))
