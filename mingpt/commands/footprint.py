"""How many bytes a process of a run needs at its peak, without computing anything: what `mingpt plan` shows.

The model, its buckets, and one microbatch's forward and backward run on fake tensors (torch's FakeTensorMode), which
have a shape and no memory. What of them lives at a time is counted; what the exchange holds follows from the tree.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mingpt.compute.buckets import BUCKET_BYTES, exchange_count
from mingpt.compute.exchange import subtrees_by_rank
from mingpt.compute.numerics import autocast_for
from mingpt.compute.reduction import MAX_IN_FLIGHT
from mingpt.compute.rules import muon_names, roles, trainable
from mingpt.compute.tree import shares, whole_subtrees
from mingpt.config.schema import Config
from mingpt.files.storage import names_a_disk
from mingpt.model.language import LanguageModel
from mingpt.snapshot.format import PART_BYTES
from mingpt.snapshot.reader import PARALLEL_PARTS
from mingpt.train.factory import build
from mingpt.train.preparing import prepare

Bytes = dict[str, int]  # by what they are for

CONSTANT_CPU = 310_000_000  # a process of a tiny model (benchmarks/memory.py)
CONSTANT_GPU = 1_000_000_000  # an estimate, not measured: CUDA's context, and the buffers of cuBLAS and NCCL
GAPS_CPU = 0.1  # of the rest: what malloc holds and nobody uses (measured: 0.02 to 0.14)


class Living(TorchDispatchMode):
    """Counts the bytes of the tensors that were made under it and are alive.

    points: after each operation (bytes, those of them that are finished gradients).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # By storage, not by tensor: a view has no memory of its own. Weights are counted elsewhere.
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
class ModelSizes:
    """The sizes of one config's model, whatever the world. In bytes, unless said otherwise."""

    # How many parameters, and how many tensors with gradients.
    parameters: int
    tensors: int
    # Of the largest tensor.
    largest: int
    # Of the trained tensor whose gradient is finished last (an embedding), and of the largest of the others.
    first: int
    others: int
    # Of the weights that Muon updates: they have one moment, not two.
    of_muon: int
    # Of all gradients.
    gradients: int
    # Tokens, with the padding.
    vocabulary: int
    # What one microbatch keeps for backward, at the end of forward.
    kept: int
    # The most of a forward without gradients.
    evaluation: int
    # See Living.
    points: list[tuple[int, int]]

    def peak(self, weight: float, copies: float = 0, most: int = 0, whole: int = 0) -> int:
        """The most bytes of a microbatch at a time, if a finished gradient counts `weight` times.

        copies: how many more there are of the last `most` bytes of the finished gradients. whole: bytes of the first
        tensor's sums that stay until the last of its flights.
        """
        return int(
            max(
                here + (weight - 1) * done + copies * min(done, most) + whole * (done == self.gradients)
                for here, done in self.points
            )
        )


@contextmanager
def without_memory() -> Iterator[None]:
    """What is made here has shapes only. torch's random state stays as it was."""
    with torch.random.fork_rng(devices=[]), FakeTensorMode():
        yield


def look_at(config: Config) -> ModelSizes:
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
            with autocast_for(config, torch.device("cpu")), torch.no_grad():
                model.eval()(tokens, targets)
            evaluation = max(living.points)[0]
            living.points.clear()
            with autocast_for(config, torch.device("cpu")):
                loss, _ = model.train()(tokens, targets)
            kept = living.bytes
            loss.backward()
        of_muon = muon_names(config.optimizer.name, roles(model))
        found = ModelSizes(
            parameters=sum(p.numel() for p in everything),
            tensors=len(named),
            largest=max(p.nbytes for p in everything),
            first=named[0][1].nbytes,
            others=max((p.nbytes for _, p in named[1:]), default=0),
            of_muon=sum(p.nbytes for name, p in named if name in of_muon),
            gradients=sum(p.nbytes for _, p in named),
            vocabulary=model.config.padded_vocab_size,
            kept=kept,
            evaluation=evaluation,
            points=living.points,
        )
    torch.set_num_threads(threads)
    return found


@dataclass(frozen=True)
class Footprint:
    """Bytes of the process that needs most, by what they are for."""

    # All the time.
    steady: Bytes
    # Of a step, one after the other: only the largest counts.
    phases: Bytes
    # What the phases consist of.
    parts: Bytes
    # Copies for snapshots, and the parts being written: in the machine's memory, never in a GPU's.
    snapshots: Bytes
    # Two hot snapshots, of each node.
    hot: Bytes
    # What travels between the nodes if one of them alone has the run's disk.
    network: Bytes

    @property
    def step(self) -> int:
        return max(self.phases.values())

    def total(self, gpu: bool) -> int:
        """Where it computes: on its GPU, or in the machine's memory."""
        needed = sum(self.steady.values()) + self.step
        if gpu:
            return needed + CONSTANT_GPU
        return int((1 + GAPS_CPU) * (needed + sum(self.snapshots.values()))) + CONSTANT_CPU


def footprint(config: Config, model: ModelSizes, processes: int, per_node: int, graphs: bool = False) -> Footprint:
    """How much memory the process that needs most takes. processes: of the run; per_node: of each node.

    graphs: whether microbatches are replays of a CUDA graph (not with reduce=fast). What the graph holds is free for
    nothing else: what a microbatch needs, and a place for all of its gradients. Each of several processes computes its
    last microbatch without the graph, since the exchange overlaps its backward.
    """
    microbatches = config.global_size(processes) // config.batch.micro_size
    slices = processes if config.shards else 1
    whole = (2 + bool(config.optimizer.ema)) * model.gradients - model.of_muon  # all moments, and the weights' mean
    weights, moments = 4 * model.parameters, -(-whole // slices)
    g = model.gradients
    several = microbatches > processes
    shape = _shape(processes, per_node)
    fast = config.reduce == "fast"
    ranges = shares(*shape, microbatches)
    # By process, how many partial sums it holds before each of its microbatches, and how many more after it.
    steps = [[(int(several), 0)]] if fast else [changes_of_sums(mine, microbatches) for mine in ranges]
    # By process, the rows of a bucket in its first hop. What is sent and received is that, times what is under way.
    rows = [len(subtrees) for subtrees in subtrees_by_rank(*shape, microbatches)[0]]
    sent = max(rows)
    received = sum(rows) / processes
    cut = exchange_count(model.first) if shape[0] > 1 else 1
    flight = min(g, max(BUCKET_BYTES, model.others, model.first // cut)) * (processes > 1 and not fast)
    flights = MAX_IN_FLIGHT * flight
    kept = sent * model.first * (cut > 1)
    positions = config.batch.micro_size * config.model.block_size
    at_once = min(positions, config.train.loss_rows or positions)
    # Beside its graph, a replayed microbatch needs nothing but copies of the gradients that begin a partial sum.
    replayed = replace(model, points=[(0, 0), (g, g)]) if graphs and not fast else model
    last = replayed if processes == 1 else model
    if fast:
        phases = {"a microbatch": g * several + model.peak(0 if several else 1)}
    else:
        # A gradient is added to a partial sum as soon as it is there, or becomes one. In the last backward, a slice of
        # the whole sum takes its place.
        phases = {
            "a microbatch": max((n * g + replayed.peak(more) for of in steps for n, more in of[:-1]), default=0),
            "the last microbatch, and the exchange": max(
                n * g + last.peak(1 / slices - n, sent + received, flights, kept) for (*_, (n, _)) in steps
            ),
        }
    steady = {"weights": weights, "optimizer state": moments}
    if replayed is not model:
        steady["CUDA graph of a microbatch"] = model.peak(0) + g
        phases["evaluation"] = model.evaluation
    return Footprint(
        steady=steady,
        phases=phases | {"update": _update(model, slices)},
        parts={
            "partial sums of gradients": max(n for of in steps for n, _ in of) * g,
            "activations that backward needs": model.kept,
            "logits of a microbatch or piece": 4 * model.vocabulary * at_once,
            "gradients that are sent": sent * flights,
            "slices that are received": int(received * flights),
        },
        snapshots=_snapshots(config, model, moments, slices, processes, per_node),
        hot={config.snapshot.hot_dir: 2 * (weights + whole)} if config.snapshot.hot_every_steps else {},
        network=_network(config, weights + whole, moments if slices > 1 else 0, processes - per_node),
    )


def _shape(processes: int, per_node: int) -> tuple[int, int]:
    """Return what World.shape is: two hops only if all nodes have the same number of processes, and more than one."""
    nodes, rest = divmod(processes, per_node)
    return (nodes, per_node) if nodes > 1 and per_node > 1 and not rest else (1, processes)


def _network(config: Config, state: int, slices: int, others: int) -> Bytes:
    """What travels between nodes if one has the disk. slices: bytes of a process. others: processes elsewhere."""
    if not (names_a_disk(config.snapshot.dir) and others):
        return {}
    # Whole tensors are there already. At a start each process gets all parts, and takes what it needs.
    return {"to the run's node, each snapshot": others * slices, "from there, each start": others * state}


def changes_of_sums(share: range, microbatches: int) -> list[tuple[int, int]]:
    """For each microbatch of a process: how many partial sums it holds before, and how many more after it."""
    counts = [len(whole_subtrees(share.start, m, 0, microbatches)) for m in range(share.start, share.stop + 1)]
    return [(before, after - before) for before, after in pairwise(counts)]


def _update(model: ModelSizes, slices: int) -> int:
    """The sums, what is gathered, and Muon's directions: new momentum, look ahead, result; and what owners exchange."""
    copies = 2 if slices > 1 else 1
    return copies * -(-model.gradients // slices) + 3 * copies * -(-model.of_muon // slices)


def _snapshots(config: Config, model: ModelSizes, moments: int, slices: int, processes: int, per_node: int) -> Bytes:
    """Copies of the state: of slices one's own, of whole tensors those in this process's share of the parts."""
    part, weights = max(PART_BYTES, model.largest), 4 * model.parameters
    whole, own = (weights, moments) if slices > 1 else (weights + moments, 0)

    def share_of_parts(size: int, writers: int) -> int:
        return min(size, -(-size // (part * writers)) * part)

    # A folder may be on one node's disk; then that node's processes write all.
    tiers = {"durable": per_node if names_a_disk(config.snapshot.dir) else processes}
    tiers |= {"hot": per_node} if config.snapshot.hot_every_steps else {}
    copies = {f"copy for {tier} snapshots": share_of_parts(whole, n) + own for tier, n in tiers.items()}
    if own:  # slices come from all processes, are put together, and wait to be written
        writers = min(tiers.values())
        ahead = max(2, PARALLEL_PARTS // writers) * part
        copies["parts being written"] = min(ahead, share_of_parts(moments * slices, writers))
    return copies


def changed(config: Config, key: str, value: object) -> Config:
    """With another value of a key, such as train.recompute."""
    section, name = key.split(".")
    return config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
