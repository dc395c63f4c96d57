"""Whole training steps on fake CUDA tensors, with torch's CUDA wheel, without a GPU and without a driver.

`LD_PRELOAD=… python fake_steps.py ARGUMENTS`: those of `steps`, as a JSON list. Prints what each rank's last step did,
as JSON. Torch itself decides what runs: fake tensors have a device and a shape, and no memory. What needs a driver
(streams, events, pinned memory) is replaced by what does nothing.
"""

import json
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives on fake tensors
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mingpt.commands.footprint import footprint, look_at
from mingpt.compose.compose import configure
from mingpt.compute.batches import BatchPlan
from mingpt.compute.numerics import autocast_for
from mingpt.compute.reduction import ExactReduction
from mingpt.config.schema import Config
from mingpt.train.context import StepContext, make_context
from mingpt.train.factory import build
from mingpt.train.figures import DelayedRead
from mingpt.train.graphs import RECORDERS, Graphs, MicrobatchGraph
from mingpt.train.preparing import prepare
from mingpt.train.step import train_step
from mingpt.world.world import World

POOL = "CUDA graph of a microbatch"
STEPS = 3  # the first ones make what stays, such as moments
BLOCK = 512  # torch's allocator rounds up to it
WAITS = {  # operations whose result the host needs
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal",
    "aten::_unique2",
}  # fmt: skip


class Watched(TorchDispatchMode):
    """What runs under it: waits and mixed devices by name, collectives, bytes on the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.living = dict[int, int]()
        self.bytes = 0
        self.forget()

    def forget(self) -> None:
        self.waits, self.mixed, self.collectives = list[str](), list[str](), list[Any]()
        self.peak = self.bytes

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        name = function._schema.name
        inputs, outputs = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in ((args, kwargs), out))
        devices = {tensor.device.type for tensor in [*inputs, *outputs]}
        if name.startswith("c10d::"):
            self.collectives.append((name, sum(tensor.nbytes for tensor in inputs)))
        elif "cuda" in devices:
            self.look_at(name, inputs, outputs, devices, args, kwargs)
        for tensor in outputs:
            self.count(tensor)
        return out

    def look_at(
        self, name: str, inputs: list[Tensor], outputs: list[Tensor], devices: set[str], args: Any, kwargs: Any
    ) -> None:
        masks = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in inputs[1:])
        if name in WAITS or (name in ("aten::index", "aten::index_put_") and masks):
            self.waits.append(name)
        if name in ("aten::_to_copy", "aten::copy_") and "cpu" in devices:
            asynchronous = kwargs.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2])
            if not asynchronous:
                self.waits.append(f"{name} {inputs[0].device.type} to {outputs[0].device.type}")
        elif any(tensor.device.type == "cpu" and tensor.dim() for tensor in inputs):
            self.mixed.append(name)

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type == "cuda" and storage._cdata not in self.living:
            size = -(-storage.nbytes() // BLOCK) * BLOCK
            self.living[storage._cdata] = size
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self.freed, storage._cdata)

    def freed(self, key: int) -> None:
        self.bytes -= self.living.pop(key)


def without_driver(watched: Watched) -> None:
    """Replace what asks the driver. `is_available` stays False: fake tensors then never ask for a device's context."""
    import torch.cuda.amp.common

    class Event:
        def __init__(self, **_: object) -> None: ...
        def record(self, *_: object) -> None: ...
        def query(self) -> bool:
            return True

        def elapsed_time(self, _: object) -> float:
            return 1.0

        def synchronize(self) -> None:
            watched.waits.append("event.synchronize")

    class Stream:
        def wait_stream(self, _: object) -> None: ...
        def wait_event(self, _: object) -> None: ...

    for module in (torch.amp.autocast_mode, torch.cuda.amp.common):
        setattr(module, "amp_definitely_not_available", lambda: False)  # noqa: B010
    for name, value in {
        "_lazy_init": lambda: None, "is_available": lambda: False, "Event": Event, "Stream": Stream,
        "current_stream": lambda *_: Stream(), "stream": lambda _: nullcontext(), "device_count": lambda: 1,
        "get_device_capability": lambda *_: (9, 0), "is_bf16_supported": lambda *_, **__: True,
        "is_tf32_supported": lambda: True, "get_device_name": lambda *_: "a fake GPU",
        "get_device_properties": lambda *_: SimpleNamespace(major=9, minor=0, multi_processor_count=132),
    }.items():  # fmt: skip
        setattr(torch.cuda, name, value)
    setattr(torch.nn.Module, "to", lambda self, *_, **__: self)  # noqa: B010  it swaps parameters, which fake ones can't be


class Captured:
    """A graph whose replay is nothing of the host's. What it was captured from stays in its pool."""

    def __init__(self, device: torch.device) -> None: ...
    def seed(self, seed: int) -> None: ...
    def replay(self) -> None: ...


def graphs_of(context: StepContext, batch: list[Tensor]) -> Graphs:
    """With a graph of this shape, captured."""
    RECORDERS["cuda"] = Captured  # type: ignore[assignment]  # it captures nothing
    assert isinstance(context.reduction, ExactReduction)
    graphs = Graphs(context, context.reduction, False, print)
    graphs.graph = MicrobatchGraph(context, context.reduction, batch)
    graphs.shapes = [(x.shape, x.dtype) for x in batch]
    graphs.graph._compute()
    return graphs


def world_of(rank: int, size: int, each: int) -> World:
    world = World(rank, size, rank % each, torch.device("cuda", 0), "nccl")
    if not 1 < each < size:
        return world
    nodes = size // each
    inside = [dist.new_group([*range(node * each, (node + 1) * each)]) for node in range(nodes)][rank // each]
    across = [dist.new_group([*range(local, size, each)]) for local in range(each)][rank % each]
    return replace(
        world,
        inside=replace(world, rank=rank % each, size=each, group=inside),
        across=replace(world, rank=rank // each, size=nodes, group=across),
    )


def steps(overrides: list[str], ranks: list[int], size: int, each: int) -> list[dict[str, Any]]:
    """What the last step of each of these ranks did. size: of the world; each: processes on each node."""
    config = configure([*overrides, "data=random", "data.workers=0", "run.dir=fake", "train.compile=false"], size)
    graphs = config.train.cuda_graphs is True
    needed = footprint(config, look_at(config), size, each, graphs)
    steady = sum(size for name, size in needed.steady.items() if name != POOL)
    planned = steady + max(size for phase, size in needed.phases.items() if phase != "evaluation")
    torch.use_deterministic_algorithms(config.reduce == "exact")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return [{**last_step(config, rank, size, each, graphs), "planned": planned} for rank in ranks]


def last_step(config: Config, rank: int, size: int, each: int, graphed: bool) -> dict[str, Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    watched = Watched()
    try:
        without_driver(watched)
        with FakeTensorMode(), watched:
            world = world_of(rank, size, each)
            with torch.device("cuda"):
                model = build(config, config.data.vocabulary_size())
            prepare(config, model)
            plan = BatchPlan(10**6, config.seed, config.global_size(size), config.batch.micro_size)
            context = make_context(config, model, plan, world, autocast_for(config, world.device))
            shape = config.batch.micro_size, config.model.block_size
            batch = [torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)]
            read, batches = DelayedRead(context.update.guard.skips, late=True), repeat(batch)
            graphs = graphs_of(context, batch) if graphed else None
            # Of the graph, only the gradients' places are counted; its pool's size is not seen without a GPU.
            pool = sum(bucket.weights.nbytes for bucket in context.reduction.buckets) if graphed else 0
            for step in range(STEPS):
                watched.forget()
                read.begin()
                stats = train_step(context, step, batches, graphs=graphs)
                read._pending = None  # a fake tensor has no numbers to read
                read.ready(step + 1, stats, drain=False)
                del stats
    finally:
        dist.destroy_process_group()
    return {
        "waits": watched.waits, "mixed": watched.mixed, "collectives": watched.collectives, "peak": watched.peak - pool,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(steps(*json.loads(sys.argv[1]))), flush=True)
