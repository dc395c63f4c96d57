"""Is a machine sick? Every so many steps each process computes a microbatch of another one again (health.audit_every).

A step is a pure function of (state, config, step), so both gradients must have the same bits. They are compared before
the update: a wrong gradient reaches no weight and no snapshot. Machines that compute wrongly now and then, without any
error, are found in every large fleet (Hochschild et al. 2021, "Cores that don't count").
"""

import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mingpt.compute.tree import shares
from mingpt.data.source import Source
from mingpt.errors import TransientError
from mingpt.observe import sick as sick_hosts
from mingpt.train.context import StepContext
from mingpt.world.world import World

CHUNK = 1 << 22  # elements hashed at a time: their 64-bit numbers take 32 MB
# Odd constants of splitmix64 (Steele et al. 2014) and of xxHash, as signed 64-bit numbers.
FIRST, SECOND = 0x9E3779B97F4A7C15 - (1 << 64), 0xC2B2AE3D27D4EB4F - (1 << 64)

Hash = list[int]  # four 64-bit numbers


def gradient_hash(gradient: Tensor) -> Tensor:
    """A hash of a float32 tensor's bits, shape (4,), int64, without waiting for the device.

    Four sums of bits times odd weights, modulo 2^64. So a single wrong element always changes one of them, and several
    cancel out with a chance of 2^-64. Integer sums have the same bits in any order.
    """
    bits = gradient.detach().contiguous().flatten().view(torch.int32)
    total = torch.zeros(4, dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        place = torch.arange(start, start + len(part), device=bits.device)
        products = part * ((place * FIRST) ^ ((place + 1) * SECOND >> 13) | 1)
        total += torch.nn.functional.pad(products, (0, -len(products) % 4)).view(-1, 4).sum(0)
    return total


def shift(hosts: Sequence[str], size: int) -> int:
    """How far the process that a process checks is from it: on another node, if there is one."""
    most = max(Counter(hosts).values())
    return most % size or 1 % size


class Audit:
    """A step computes and adds its gradients within `watch`; meanwhile the reduction calls `on_gradient` for each."""

    def __init__(
        self,
        every: int,
        run_dir: str,
        named: Iterable[tuple[str, nn.Parameter]],
        microbatches: int,
        source: Source,
        world: World,
    ) -> None:
        self.every, self.run_dir, self.source, self.world = every, run_dir, source, world
        self.parameters = dict(sorted(named))
        self.devices = world.gather([socket.gethostname(), device_name(world.device)])
        self.shares = shares(*world.shape, microbatches)
        self.shift = shift([host for host, _ in self.devices], world.size)
        self.watched: int | None = None  # the microbatch of this process that another one computes, too
        self.hashes: dict[Tensor, Tensor] = {}  # of this process's gradients of that microbatch

    def cost(self) -> str:
        count = len(self.shares[self.world.rank])
        return f"audit: every {self.every} steps, a process computes {count + 1} microbatches in place of {count}"

    @contextmanager
    def watch(self, context: StepContext, step: int) -> Iterator[None]:
        """Before the block, compute another process's microbatch, and keep the hashes of its gradient; then compare.

        step: counted from 0. Raises TransientError in all processes if a gradient differs: the next attempt computes
        it again.
        """
        if (step + 1) % self.every:
            yield
            return
        with context.hooks.phase("audit"):
            self.watched = self.microbatch(self.world.rank, step)
            theirs = self.compute_again(context, step, (self.world.rank + self.shift) % self.world.size)
        yield
        with context.hooks.phase("audit"):
            used, self.watched = [self.hashes[p].tolist() for p in self.parameters.values()], None
            self.hashes.clear()
            self._compare(context, step, used, theirs)

    def microbatch(self, rank: int, step: int) -> int:
        """Which of a process's microbatches is computed twice in this step: each in turn."""
        return self.shares[rank][step // self.every % len(self.shares[rank])]

    def compute_again(self, context: StepContext, step: int, rank: int) -> list[Hash]:
        """The hashes of the gradient, in the order of `parameters`."""
        plan, microbatch = context.plan, self.microbatch(rank, step)
        tensors = [x.to(self.world.device) for x in self.source.train[plan.by_microbatch(step)[microbatch]]]
        torch.manual_seed(plan.dropout_seed(step, microbatch))
        with context.autocast:
            loss, _ = context.model(*tensors)
        if loss.requires_grad:
            context.update.scaled(loss).backward()
        gradient_hashes = hashes(torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters.values())
        context.model.zero_grad()
        return gradient_hashes

    def on_gradient(self, microbatch: int, parameter: Tensor, gradient: Tensor) -> None:
        """Hash this process's gradient of the watched microbatch, before anything is added to it."""
        if microbatch == self.watched:
            self.hashes[parameter] = gradient_hash(gradient)

    def _compare(self, context: StepContext, step: int, used: list[Hash], theirs: list[Hash]) -> None:
        results = self.world.gather([folded(used), folded(theirs)])
        for rank, (_, other) in enumerate(results):
            checked = (rank + self.shift) % self.world.size
            if results[checked][0] != other:
                self._settle(context, step, rank, checked, used, theirs)

    def _settle(
        self, context: StepContext, step: int, checker: int, checked: int, used: list[Hash], theirs: list[Hash]
    ) -> None:
        """All compute that microbatch once more. Most of the results are right."""
        again = self.world.gather(self.compute_again(context, step, checked))
        first = self.world.gather([used if self.world.rank == checked else [], theirs])
        results = [(checked, first[checked][0]), (checker, first[checker][1]), *enumerate(again)]
        votes = Counter(str(result) for _, result in results)
        (right, most), *others = votes.most_common()
        undecided = any(count == most for _, count in others)
        sick = sorted({rank for rank, result in results if undecided or str(result) != right})
        wrong = [result for _, result in results if str(result) != right]
        good = next(result for _, result in results if str(result) == right)
        where = next(name for name, a, b in zip(self.parameters, good, wrong[0], strict=True) if a != b)
        hosts = sorted({self.devices[rank][0] for rank in sick})
        if self.world.is_main and not undecided:
            for host in hosts:
                sick_hosts.add(self.run_dir, host)
        suspects = " or ".join(f"process {r} (host {self.devices[r][0]}, {self.devices[r][1]})" for r in sick)
        which = "one of them is sick, and two can't tell which" if undecided else "its machine is sick"
        left = "" if undecided else f"; run.dir/sick-hosts names {', '.join(hosts)}"
        raise TransientError(
            f"audit of step {step + 1}: {suspects} computed another gradient than the others (of microbatch "
            f"{self.microbatch(checked, step)}, first difference in {where}): {which}. No weight was changed{left}"
        )


def device_name(device: torch.device) -> str:
    """With what tells one GPU of a host from the others."""
    if device.type != "cuda":
        return "cpu"
    about = torch.cuda.get_device_properties(device)
    return f"{device}, {about.name}, {getattr(about, 'uuid', 'without a serial number')}"


def hashes(gradients: Iterable[Tensor]) -> list[Hash]:
    by_gradient: list[Hash] = torch.stack([gradient_hash(g) for g in gradients]).tolist()
    return by_gradient


def folded(by_parameter: list[Hash]) -> Hash:
    """32 bytes for all parameters."""
    table = torch.tensor(by_parameter)
    place = torch.arange(len(table))[:, None]
    total: Hash = (table * (place * FIRST | 1)).sum(0).tolist()
    return total
