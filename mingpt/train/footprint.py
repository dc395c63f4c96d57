"""How many bytes a process of a run needs at its peak, without computing anything: what `mingpt plan` shows.

The model, its buckets, and one microbatch's forward and backward run on fake tensors (torch's FakeTensorMode), which
have a shape and no memory. What of them lives at a time is counted; what the exchange holds follows from the tree.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mingpt.compute.buckets import BUCKET_BYTES
from mingpt.compute.exchange import held
from mingpt.compute.groups import muon_names, roles
from mingpt.compute.numerics import autocast_for
from mingpt.compute.tree import Node, parents
from mingpt.config.schema import Config
from mingpt.model.language import LanguageModel
from mingpt.snapshot.format import PART_BYTES
from mingpt.snapshot.reader import PARALLEL_PARTS
from mingpt.train.factory import build, prepare, trainable
from mingpt.world.world import share

CONSTANT_CPU = 310_000_000  # a process of a tiny model (benchmarks/memory.py)
CONSTANT_GPU = 1_000_000_000  # an estimate, not measured: CUDA's context, and the buffers of cuBLAS and NCCL
GAPS_CPU = 0.1  # of the rest: what malloc holds and nobody uses (measured: 0.02 to 0.14)


class Living(TorchDispatchMode):
    """Counts the bytes of the tensors that were made under it and are alive.

    points: after each operation (bytes, those of them that are finished gradients).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._known = {p.untyped_storage()._cdata: 0 for p in [*model.parameters(), *model.buffers()]}
        self.bytes = self.gradients = 0
        self.points = list[tuple[int, int]]()
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._finished)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self._known:
                    self._known[key] = storage.nbytes()
                    self.bytes += storage.nbytes()
                    weakref.finalize(storage, self._freed, key)
        self.points.append((self.bytes, self.gradients))
        return out

    def _freed(self, key: int) -> None:
        self.bytes -= self._known.pop(key)

    def _finished(self, p: Tensor) -> None:
        self.gradients += p.nbytes
        self.points.append((self.bytes, self.gradients))


@dataclass(frozen=True)
class Microbatch:
    """What one microbatch needs. kept: for backward, at the end of forward. points: see Living."""

    kept: int
    points: list[tuple[int, int]]

    def peak(self, weight: float) -> int:
        """The most bytes at a time, if a finished gradient counts `weight` times."""
        return int(max(here + (weight - 1) * done for here, done in self.points))


@dataclass(frozen=True)
class Model:
    """Of one config, whatever the world. parameters: how many."""

    parameters: int
    largest: int  # tensor, in bytes
    of_muon: int  # weights that Muon updates, in bytes
    gradients: int  # bytes
    vocabulary: int  # with its padding
    microbatch: Microbatch


@contextmanager
def without_memory() -> Iterator[None]:
    """What is made here has shapes only. torch's random state stays as it was."""
    with torch.random.fork_rng(devices=[]), FakeTensorMode():
        yield


def look_at(config: Config) -> Model:
    """Build the model, and compute one microbatch, without memory for either."""
    threads = torch.get_num_threads()
    with without_memory():
        model = build(config, config.data.vocabulary_size())
        assert isinstance(model, LanguageModel)
        prepare(changed(config, "train.compile", False), model)
        shape = config.batch.micro_size, config.model.block_size
        tokens, targets = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        named, everything = trainable(model), list(model.parameters())
        living = Living(model)
        with living:
            with autocast_for(config, torch.device("cpu")):
                loss, _ = model(tokens, targets)
            kept = living.bytes
            loss.backward()
        of_muon = muon_names(config.optimizer.name, roles(model))
        found = Model(
            parameters=sum(p.numel() for p in everything),
            largest=max(p.nbytes for p in everything),
            of_muon=sum(p.nbytes for name, p in named if name in of_muon),
            gradients=sum(p.nbytes for _, p in named),
            vocabulary=model.config.padded_vocab_size,
            microbatch=Microbatch(kept, living.points),
        )
    torch.set_num_threads(threads)
    return found


@dataclass(frozen=True)
class Stack:
    """Copies of the gradients that ExactReduction holds. full: the most before a backward that is not the last.

    None: there is only one. last: before the last backward. sent, received: of all buckets, while they are under way;
    in two hops, in the second one. first_hop: sent and received, of a bucket in the first of two.
    """

    full: int | None
    last: int
    sent: float
    received: float
    first_hop: float = 0.0


def stack_of(rank: int, size: int, microbatches: int, per_node: int = 1) -> Stack:
    """As ExactReduction.push fills it, and as exchange.hops goes."""
    mine, above, stack, depths = share(rank, size, microbatches), parents(microbatches), list[Node](), list[int]()
    for microbatch in mine:
        depths.append(len(stack))
        node = (microbatch, microbatch + 1)
        while stack and (parent := above.get((stack[-1], node))):
            stack.pop()
            node = parent
        stack.append(node)
    full, last = max(depths[:-1], default=None), depths[-1]
    rows = _rows(size, microbatches)
    if not 1 < per_node < size:
        return Stack(full, last, rows[rank], sum(rows) / size if size > 1 else 0)
    nodes, here = _rows(size // per_node, microbatches), rank // per_node
    inside = sum(rows[here * per_node : (here + 1) * per_node]) / per_node
    return Stack(full, last, nodes[here] / per_node, sum(nodes) / size, rows[rank] + inside)


def _rows(size: int, microbatches: int) -> list[int]:
    """The partial sums of each of `size` shares."""
    return [len(nodes) for nodes in held(size, microbatches)]


@dataclass(frozen=True)
class Footprint:
    """Bytes of the process that needs most. steady: all the time. phases: of a step; only the largest counts.

    parts: of the phases. snapshots: copies for snapshots, and the parts being written. These are in the machine's
    memory, never in a GPU's. hot: two hot snapshots, of each node.
    """

    steady: dict[str, int]
    phases: dict[str, int]
    parts: dict[str, int]
    snapshots: dict[str, int]
    hot: dict[str, int]

    @property
    def step(self) -> int:
        return max(self.phases.values())

    def total(self, gpu: bool) -> int:
        """Where it computes: on its GPU, or in the machine's memory."""
        there = sum(self.steady.values()) + self.step
        if gpu:
            return there + CONSTANT_GPU
        return int((1 + GAPS_CPU) * (there + sum(self.snapshots.values()))) + CONSTANT_CPU


def footprint(config: Config, model: Model, processes: int, per_node: int) -> Footprint:
    """Of the worst process. processes: of the run; per_node: of each node."""
    microbatches = config.global_size(processes) // config.batch.micro_size
    slices = processes if config.shards else 1
    whole = 2 * model.gradients - model.of_muon  # all moments
    weights, moments = 4 * model.parameters, -(-whole // slices)
    stacks = {stack_of(r, processes, microbatches, per_node) for r in range(processes)}
    fast = config.reduce == "fast"
    phases, worst = max(
        ((_fast_phases(model, stack) if fast else _phases(model, stack), stack) for stack in stacks),
        key=lambda pair: max(pair[0].values()),
    )
    rows = config.batch.micro_size * config.model.block_size
    return Footprint(
        steady={"weights": weights, "optimizer state": moments},
        phases=phases | {"update": _update(model, slices)},
        parts={
            "partial sums of gradients": max(worst.full or 0, worst.last) * model.gradients,
            "activations that backward needs": model.microbatch.kept,
            "logits of a microbatch or piece": 4 * model.vocabulary * min(rows, config.train.loss_rows or rows),
            "gradients that are sent": int(worst.sent * model.gradients) if processes > 1 else 0,
            "slices that are received": int(worst.received * model.gradients),
        },
        snapshots=_snapshots(config, model, moments, slices, processes, per_node),
        hot={config.snapshot.hot_dir: 2 * (weights + whole)} if config.snapshot.hot_every_steps else {},
    )


def _phases(model: Model, stack: Stack) -> dict[str, int]:
    g, microbatch, phases = model.gradients, model.microbatch, dict[str, int]()
    if stack.full is not None:
        phases["a microbatch"] = stack.full * g + microbatch.peak(1)
    # Each gradient that is finished takes the place of its partial sums, and is sent; one bucket is in its first hop
    # while another is filled.
    first = int(2 * stack.first_hop * min(g, max(BUCKET_BYTES, model.largest)))
    peak = stack.last * g + microbatch.peak(stack.sent + stack.received - stack.last)
    return phases | {"the last microbatch, and the exchange": peak + first}


def _fast_phases(model: Model, stack: Stack) -> dict[str, int]:
    several = stack.full is not None
    return {"a microbatch": model.gradients * several + model.microbatch.peak(0 if several else 1)}


def _update(model: Model, slices: int) -> int:
    """The sums, what is gathered, and Muon's directions: new momentum, look ahead, result; and what owners exchange."""
    copies = 2 if slices > 1 else 1
    return copies * -(-model.gradients // slices) + 3 * copies * -(-model.of_muon // slices)


def _snapshots(
    config: Config, model: Model, moments: int, slices: int, processes: int, per_node: int
) -> dict[str, int]:
    """Copies of the state: of slices one's own, of whole tensors those in this process's share of the parts."""
    part, weights = max(PART_BYTES, model.largest), 4 * model.parameters
    whole, own = (weights, moments) if slices > 1 else (weights + moments, 0)

    def share_of_parts(writers: int) -> int:
        state = weights + moments * slices
        parts = -(-state // part)
        return min(state, -(-parts // writers) * part)

    tiers = {"durable": processes} | ({"hot": per_node} if config.snapshot.hot_every_steps else {})
    copies = {f"copy for {tier} snapshots": min(whole, share_of_parts(n)) + own for tier, n in tiers.items()}
    if own:  # slices come from all processes, are put together, and wait to be written
        rest = max(0, share_of_parts(min(tiers.values())) - whole)
        copies["parts being written"] = 2 * part + min(PARALLEL_PARTS * part, rest)
    return copies


def changed(config: Config, key: str, value: object) -> Config:
    """With another value of a key, such as train.recompute."""
    section, name = key.split(".")
    return config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
