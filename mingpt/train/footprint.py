"""How many bytes a process of a run needs at its peak, without computing anything: what `mingpt plan` shows.

The model, its buckets, and one microbatch's forward and backward run on fake tensors (torch's FakeTensorMode), which
have a shape and no memory. What of them lives at a time is counted; what the exchange holds follows from the tree.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mingpt.compute.buckets import BUCKET_BYTES, make_buckets
from mingpt.compute.exchange import held
from mingpt.compute.groups import muon_names, roles
from mingpt.compute.numerics import autocast_for
from mingpt.compute.tree import Node, parents
from mingpt.config.schema import Config
from mingpt.model.language import LanguageModel
from mingpt.snapshot.format import PART_BYTES
from mingpt.snapshot.reader import PARALLEL_PARTS
from mingpt.train.factory import build, prepare, trainable
from mingpt.world.world import World, share

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

    def peak(self, weight: float, more: float = 0.0, most: int = 0) -> float:
        """The most bytes at a time, if a finished gradient counts `weight` times, and `most` bytes of them `more`."""
        return max(here + (weight - 1) * done + more * min(most, done) for here, done in self.points)


@dataclass(frozen=True)
class Model:
    """Of one config, whatever the world. parameters, trained: how many."""

    parameters: int
    trained: int
    frozen_bytes: int
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
        trained = sum(p.nbytes for _, p in named)
        found = Model(
            parameters=sum(p.numel() for p in everything),
            trained=sum(p.numel() for _, p in named),
            frozen_bytes=sum(p.nbytes for p in everything) - trained,
            largest=max(p.nbytes for p in everything),
            of_muon=sum(p.nbytes for name, p in named if name in of_muon),
            gradients=trained,
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

    staging: copies for snapshots, and the parts being written. They are in the machine's memory, never in a GPU's.
    """

    stack: Stack
    own: int  # microbatches of a process
    kept: int  # for backward, of a microbatch
    logits: int
    moments: int  # of all processes
    steady: dict[str, int] = field(default_factory=dict)
    phases: dict[str, int] = field(default_factory=dict)
    staging: dict[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return max(self.phases.values())

    @property
    def gaps(self) -> int:
        """Between allocations, in the machine's memory."""
        return int(GAPS_CPU * (sum(self.steady.values()) + self.step + sum(self.staging.values())))

    def total(self, gpu: bool) -> int:
        """Where it computes: on its GPU, or in the machine's memory."""
        here = sum(self.steady.values()) + self.step
        return here + (CONSTANT_GPU if gpu else sum(self.staging.values()) + self.gaps + CONSTANT_CPU)


def footprint(config: Config, model: Model, processes: int, per_node: int) -> Footprint:
    """Of the worst process. processes: of the run; per_node: of each node."""
    microbatches = config.global_size(processes) // config.batch.micro_size
    exact = config.reduce == "exact"
    ranks = {stack_of(r, processes, microbatches, per_node) for r in range(processes)}
    slices = processes if config.shards else 1
    weights, moments = _buckets(config, processes)
    rows = config.batch.micro_size * config.model.block_size
    phases, worst = dict[str, int](), Stack(None, 0, 0, 0)
    for stack in ranks:
        found = _phases(model, stack) if exact else _fast_phases(model, stack)
        found["update"] = _update(model, moments, slices)
        if max(found.values()) > max(phases.values(), default=0):
            phases, worst = found, stack
    return Footprint(
        stack=worst,
        own=-(-microbatches // processes),
        kept=model.microbatch.kept,
        logits=4 * model.vocabulary * min(rows, config.train.loss_rows or rows),
        moments=moments * slices,
        steady={"weights": weights + model.frozen_bytes, "optimizer state": moments},
        phases=phases,
        staging=_staging(config, model, moments, slices, processes, per_node),
    )


def _buckets(config: Config, processes: int) -> tuple[int, int]:
    """(weights with padding, this process's moments), in bytes."""
    with without_memory():
        model = build(config, config.data.vocabulary_size())
        world = World(0, processes, 0, torch.device("cpu"), "")
        of_muon = muon_names(config.optimizer.name, roles(model))
        buckets = make_buckets(trainable(model), of_muon, world, config.shards)
        moments = sum(b.mine.nbytes * (1 if b.slots[0].name in of_muon else 2) for b in buckets)
        return sum(b.weights.nbytes for b in buckets), moments


def _phases(model: Model, stack: Stack) -> dict[str, int]:
    g, microbatch = model.gradients, model.microbatch
    found = {}
    if stack.full is not None:
        found["a microbatch"] = stack.full * g + int(microbatch.peak(1))
    # Each gradient that is finished takes the place of its partial sums, and is sent.
    after = stack.sent + stack.received
    # One bucket is in its first hop while another is filled.
    peak = microbatch.peak(after - stack.last, 2 * stack.first_hop, max(BUCKET_BYTES, model.largest))
    found["the last microbatch, and the exchange"] = stack.last * g + int(peak)
    return found


def _fast_phases(model: Model, stack: Stack) -> dict[str, int]:
    several = stack.full is not None
    return {"a microbatch": model.gradients * several + int(model.microbatch.peak(0 if several else 1))}


def _update(model: Model, moments: int, slices: int) -> int:
    """The sums, what is gathered, and Muon's directions: new momentum, look ahead, result; and what owners exchange."""
    own = -(-model.gradients // slices)
    muon = -(-model.of_muon // slices)
    return own + (own if slices > 1 else 0) + (6 if slices > 1 else 3) * muon


def _staging(config: Config, model: Model, moments: int, slices: int, processes: int, per_node: int) -> dict[str, int]:
    """Copies of the state: of slices one's own, of whole tensors those in this process's share of the parts."""
    part, weights = max(PART_BYTES, model.largest), 4 * model.parameters
    whole, own = (weights, moments) if slices > 1 else (weights + moments, 0)
    found, state = dict[str, int](), weights + moments * slices
    tiers = {"durable": processes} | ({"hot": per_node} if config.snapshot.hot_every_steps else {})
    for tier, writers in tiers.items():
        share = _share_of_parts(state, part, writers)
        found[f"copy for {tier} snapshots"] = min(whole, share) + own
    if own:  # slices come from all processes, are put together, and wait to be written
        share = _share_of_parts(state, part, min(tiers.values()))
        found["parts being written"] = 2 * part + min(PARALLEL_PARTS * part, max(0, share - whole))
    return found


def _share_of_parts(total: int, part: int, writers: int) -> int:
    parts = -(-total // part)
    return min(total, -(-parts // writers) * part)


def changed(config: Config, key: str, value: object) -> Config:
    """With another value of a key, such as train.recompute."""
    section, name = key.split(".")
    return config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
