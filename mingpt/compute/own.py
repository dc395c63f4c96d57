"""An optimizer of the user's own: what `optimizer._target_` names, and how its update is called.

One that is elementwise is called with this process's slices, as AdamW is. Any other one is called with whole tensors,
by their owners, as Muon is. Both have the same bits in any world, if the optimizer is what it says: it is tried out.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mingpt.compute.buckets import CHUNK, Bucket, Sliced, Slot
from mingpt.compute.layout import MARK
from mingpt.compute.muon import Owners
from mingpt.compute.rules import Rule
from mingpt.config import plugin
from mingpt.config.section import Own
from mingpt.errors import UserError
from mingpt.world.world import World

# Elements of the tensor that an elementwise update is tried on, and where it is cut. So many are more than torch gives
# to one thread, so the borders of threads are tried, too; slices of the state are cut at chunks.
TRIAL_SIZE, TRIAL_CUT = 24 * CHUNK, 7 * CHUNK

FORM = "write update(param, grad, state, *, step, lr, weight_decay) and state(shape) as in examples/own_optimizer.py"
STATE = "state(shape) gives the shape of each tensor that is remembered, by name"
WHOLE = "set elementwise = False, and it is called with whole tensors"


class OwnOptimizer(Protocol):
    """Describes what such a class has."""

    # Whether a new element follows from the old one, its gradient and its state alone.
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
        self.held = dict[str, dict[str, Tensor]]()
        # The same as a snapshot stores it, by its name there.
        self.stored = dict[str, Sliced]()
        for k, (i, slot) in enumerate(self.owners.slots):
            self.held[slot.name] = {}
            for name, shape in self.shapes(slot.parameter.shape).items():
                self._make_state(buckets[i], k, slot, name, shape)

    def _make_state(self, bucket: Bucket, k: int, slot: Slot, name: str, shape: torch.Size) -> None:
        """Make what is remembered of a parameter under this name: zeros."""
        count, rank, zeros = shape.numel(), self.world.rank, bucket.weights.new_zeros
        if self.optimizer.elementwise:
            piece = slice(0, 0)
            for other, part in bucket.pieces(bucket.owned):
                if other is slot:
                    piece = part
            flat = held = zeros(piece.stop - piece.start)
            stride, ranges = slot.parameter.stride(), bucket.ranges(slot)
        else:
            # One process has all of it, as a slice that happens to be whole: so snapshots need no second way.
            owned, owner = k in self.owners.owned, self.owners.owners[k]
            flat = zeros(count if owned else 0)
            held = flat.view(shape) if owned else flat
            stride = torch.empty(shape, device="meta").stride()
            ranges = tuple(range(count if r == owner else 0) for r in range(self.world.size))
        if not self.owners.shared:
            ranges = (range(count),) * self.world.size
        self.held[slot.name][name] = held
        self.stored[slot.name + MARK + name] = Sliced(shape, stride, flat.dtype, ranges, flat[: len(ranges[rank])])

    def shapes(self, shape: torch.Size) -> dict[str, torch.Size]:
        """Give the shapes of what is remembered of such a tensor, by name. Raises UserError if it does not say them."""
        shown = f"{self.shown}: state({list(shape)})"
        try:
            shapes = {name: torch.Size(of) for name, of in self.optimizer.state(shape).items()}
        except (Exception, SystemExit) as error:
            raise UserError(f"{shown} failed: {plugin.describe(error, type(self.optimizer))}: {STATE}") from error
        if self.optimizer.elementwise and {shape, *shapes.values()} != {shape}:
            # Of a slice, nobody could tell which elements of it belong there.
            raise UserError(f"{shown} has another shape than the tensor, which only whole ones may: {WHOLE}")
        return shapes

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
        # It gets copies, so its code need not know that a step may be skipped, which only the device knows.
        new = p.clone()
        after = {name: old.clone() for name, old in state.items()}
        # A copy of the gradient, too: on a GPU, bits of a sum may depend on where a tensor lies.
        self.optimizer.update(new, gradient.clone(), after, step=step, lr=lr, weight_decay=decay)
        for name, old in state.items():
            old.copy_(torch.where(skip, old, after[name]))
        return torch.where(skip, p, new)

    def state(self) -> dict[str, Tensor | Sliced]:
        """All that snapshots hold of it; the tensors themselves, not copies."""
        if self.owners.shared:
            return dict(self.stored)
        return {key: t.local.as_strided(t.shape, t.stride) for key, t in self.stored.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` gave, whole, or a part of it. What is of another optimizer is left out."""
        for key, value in state.items():
            t = self.stored.get(key)
            if t and t.shape == value.shape:
                # In the order of the parameter's memory, of which ranges are.
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
        shapes = [torch.Size([TRIAL_SIZE])]
        if not elementwise:
            # The smallest one of each number of dimensions: trying takes copies and time.
            smallest = dict[int, torch.Size]()
            for shape in sorted((slot.parameter.shape for _, slot in self.owners.slots), key=torch.Size.numel):
                smallest.setdefault(len(shape), shape)
            shapes = [*smallest.values()]
        numbers = torch.Generator().manual_seed(1)
        for shape in shapes:
            # A tensor and the gradients of two steps: what is remembered begins as zeros, and shows in the second.
            tensors = torch.randn([3, *shape], generator=numbers).to(self.world.device)
            outcome = self._two_steps(*tensors)
            if other := _differing(outcome, self._two_steps(*tensors)):
                raise UserError(
                    f"{self.shown}: update gives other bits for {other} when it is called again: it must draw no "
                    "random numbers, and remember nothing outside of its state"
                )
            if elementwise:
                left = self._two_steps(*tensors[:, :TRIAL_CUT])
                right = self._two_steps(*tensors[:, TRIAL_CUT:])
                joined = {name: torch.cat([left[name], right[name]]) for name in outcome}
                if other := _differing(outcome, joined):
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
    # As integers: a NaN is equal to no other, and 0 to -0.
    return ", ".join(n for n in a if not torch.equal(a[n].view(torch.int32), b[n].view(torch.int32)))
