"""`mingpt plan [key=value …] --gpus NAME:N [--num-nodes N]`: what a run needs and costs, before a machine is rented.

The keys are those of `mingpt train`; without data, random tokens of GPT-2's vocabulary. Nothing is computed, and no GPU
is needed: the model and one microbatch are looked at on tensors without memory. Exit codes: 0; 64 a problem of the
config (all are listed), or the run does not fit. For a GPU the last line is the largest batch.micro_size that fits.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mingpt.cli.console import say, say_json
from mingpt.commands.footprint import Footprint, ModelSizes, changed, footprint, look_at
from mingpt.compose import compose
from mingpt.compute.batches import position
from mingpt.config.checks import impossible
from mingpt.config.models import Language
from mingpt.config.schema import Config
from mingpt.errors import FINISHED, UserError
from mingpt.files.folder import alone
from mingpt.observe.ledger import duration
from mingpt.observe.speed import GPUS, flops_per_token
from mingpt.train.preparing import why_no_graph

GB = 10**9
MFU = 0.4  # of the GPUs' peak, for the time that a run takes: what large models reach
ROOM = 0.05  # of a GPU's memory, for what the allocator can't use
# Seconds of the host, measured on an H200's (docs/gpus.md): forward and backward of a block as torch launches their
# kernels, compiled and not; a gradient's hook. Not measured, an estimate from a prototype: the replay of a graph.
COMPILED_BLOCK, EAGER_BLOCK, HOOK, REPLAY = 3.8e-3, 4.4e-3, 43e-6, 0.3e-3
CURES = (
    "optimizer.shard=true", "train.recompute=block", "train.loss_rows=1024", "another batch.micro_size", "more nodes",
)  # fmt: skip


def plan_command(options: Namespace) -> int:
    name, gpus, per_node = _machine(options)
    gpu, processes = GPUS.get(name), per_node * options.num_nodes
    config = _config(options.overrides, processes)
    if per_node > gpus and config.world.backend != "gloo":
        raise UserError(f"--processes {per_node}: with {gpus} GPUs a node, they share GPUs: set world.backend=gloo")
    sharing = -(-per_node // gpus)  # processes of one GPU

    def planned(config: Config, model: ModelSizes) -> tuple[bool, Footprint, bool | None]:
        """Whether microbatches are replays of a CUDA graph, what the run needs, and whether a GPU has so much."""
        if not gpu or config.train.cuda_graphs is False or why_no_graph(config, processes):
            ways = [False]
        else:  # with auto, what has no room for a graph is trained without one
            ways = [True, False] if config.train.cuda_graphs == "auto" else [True]
        for graphs in ways:
            needed = footprint(config, model, processes, per_node, graphs)
            fits = needed.total(True) * sharing <= gpu.memory * GB * (1 - ROOM) if gpu else None
            if fits:
                break
        return graphs, needed, fits

    model = look_at(config)
    graphs, needed, fits = planned(config, model)
    total = needed.total(bool(gpu))
    largest = _largest_that_fits(config, processes, planned) if gpu else None
    plan = {"parameters": model.parameters, "processes": processes, **vars(needed), "total": total}
    if options.json:
        say_json(plan | {"fits": fits, "largest_micro_size": largest})
    else:
        say("\n".join(_lines(plan)))
        if needed.network:
            say(f"unless all nodes share it, {alone(config.run.dir, 'one node')}")
        if gpu:
            speed = gpu.peak(config.precision) * MFU * min(gpus, per_node) * options.num_nodes
            say(_cost(config, model, speed, host_seconds(config, model, processes, graphs)))
            say(f"{'fits' if fits else 'does not fit'} into a {name} of {gpu.memory} GB, of which {ROOM:.0%} stay free")
            say(f"the largest that fits: batch.micro_size={largest}" if largest else "no batch.micro_size fits")
    if fits is False:
        has = {
            "optimizer.shard=true": config.optimizer.shard,
            "train.recompute=block": config.train.recompute == "block",
        }
        cures = ", ".join(cure for cure in CURES if not has.get(cure))
        raise UserError(f"the run needs too much memory; what spares some (docs/memory.md): {cures}")
    return FINISHED


def _largest_that_fits(
    config: Config, processes: int, planned: Callable[[Config, ModelSizes], tuple[bool, Footprint, bool | None]]
) -> int | None:
    """The largest batch.micro_size of this batch that fits, None if none does.

    All are tried, the largest first: fewer samples need less memory, but more microbatches more partial sums.
    """
    samples = config.batch.per_process_size or config.batch.global_size
    for size in range(samples, 0, -1):
        if samples % size == 0:
            candidate = changed(config, "batch.micro_size", size)
            if not any(impossible(candidate, processes, set())) and planned(candidate, look_at(candidate))[2]:
                return size
    return None


def _lines(plan: Mapping[str, Any]) -> Iterator[str]:
    for key, value in plan.items():
        if value == {}:
            continue
        if isinstance(value, dict):
            yield f"{key}:"
            yield from (f"  {name:<42}{size / GB:8.2f} GB" for name, size in value.items())
        else:
            yield f"{key}: {value / GB:.2f} GB" if key == "total" else f"{key}: {value:,}"


def host_seconds(config: Config, model: ModelSizes, processes: int, graphs: bool) -> float:
    """How long the host takes to launch a step's microbatches. The device may wait for it.

    graphs: whether microbatches are replays of a CUDA graph; of several processes, each one's last is not.
    """
    assert isinstance(config.model, Language)
    microbatches = -(-config.global_size(processes) // (config.batch.micro_size * processes))
    replays = microbatches - (processes > 1) if graphs else 0
    block = COMPILED_BLOCK if config.train.compile else EAGER_BLOCK
    launches = config.model.n_layer * block + model.tensors * HOOK
    return replays * REPLAY + (microbatches - replays) * launches


def _cost(config: Config, model: ModelSizes, speed: float, host: float) -> str:
    """How long the steps compute, and what that costs. speed: operations a second. host: see host_seconds."""
    shape, steps = config.model, config.train.max_steps
    assert isinstance(shape, Language)
    tokens = position(steps, config.batch.global_size, config.batch.double_at) * shape.block_size
    computing = tokens * flops_per_token(model.parameters, shape.n_layer, shape.n_embd, shape.block_size) / speed
    seconds, price = max(computing, steps * host), config.run.price_per_hour
    cost = f", a cost of {price * seconds / 3600:,.2f}" if price else "; run.price_per_hour=… tells the cost"
    parts = f"the GPUs {duration(computing)} at {MFU:.0%} of the peak, their hosts {duration(steps * host)}"
    time = f"{duration(seconds)} of computing, without the network (estimates: {parts})"
    return f"{steps:,} steps, {tokens:,} tokens: {time}{cost}"


def _machine(options: Namespace) -> tuple[str, int, int]:
    """(the GPU's name, "" for none; GPUs of each node, or its processes without; processes on each node)."""
    if options.num_nodes < 1 or (options.processes or 1) < 1:
        raise UserError("--num-nodes and --processes: give numbers from 1")
    if options.gpus in (None, "", "none"):
        return "", options.processes or 1, options.processes or 1
    asked, _, number = options.gpus.partition(":")
    name = next((name for name in GPUS if name.upper() == asked.upper()), "")
    if not name:
        raise UserError(f"--gpus {options.gpus}: the memory of this GPU is not known here; there are {', '.join(GPUS)}")
    if not (number or "1").isdecimal() or int(number or 1) < 1:
        raise UserError(f"--gpus {options.gpus}: give NAME:NUMBER, such as L4:1")
    count = int(number or 1)
    return name, count, options.processes or count


def _config(overrides: list[str], processes: int) -> Config:
    named = any(word.startswith(("data", "experiment=", "+experiment=")) for word in overrides)
    config = compose.configure([*([] if named else ["data=random"]), *overrides], processes)
    if not isinstance(config.model, Language) or config.optimizer.target:
        own = "optimizer" if config.optimizer.target else "model"
        raise UserError(f"{own}._target_: only this package's models and optimizers can be planned, not one's own")
    return config
