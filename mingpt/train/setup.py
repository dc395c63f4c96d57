"""Sets up what computes a config's steps: its model on the device, its context, its batches, its graphs.

A run, a replay and benchmarks do it alike.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from torch import Tensor, nn

from mingpt.cli.console import say
from mingpt.compute.batches import BatchPlan, RankSampler
from mingpt.compute.mixture import MixedPlan
from mingpt.compute.numerics import autocast_for, pin
from mingpt.compute.own import OwnUpdate
from mingpt.compute.reduction import ExactReduction
from mingpt.config.schema import Config
from mingpt.config.section import Own
from mingpt.data.loader import load
from mingpt.data.source import Microbatch, Source, spread
from mingpt.errors import UserError
from mingpt.model.language import IGNORE
from mingpt.observe.speed import gpu_part
from mingpt.train.context import StepContext, make_context
from mingpt.train.evaluation import evaluated_part
from mingpt.train.graphs import RECORDERS, Graphs
from mingpt.train.own_model import try_out
from mingpt.train.preparing import give_memory, prepare, why_no_graph
from mingpt.world.warmup import warm_up
from mingpt.world.world import World

MOST_READ = 1000  # samples, to find one with a target


def check_targets(config: Config, source: Source) -> None:
    """Raise UserError if no target counts in what is trained on or evaluated on, as far as MOST_READ samples tell."""
    if not isinstance(config.data, Own):  # in the package's own kinds of data each sample has targets
        return
    train = source.train
    _check_split(config, "training", (train[[i]] for i in spread(len(train), MOST_READ)))
    if len(source.validation):
        part = evaluated_part(source.validation, config.train.eval_batches)
        _check_split(config, "validation", (part[i] for i in range(len(part))))


def _check_split(config: Config, name: str, microbatches: Iterable[Microbatch]) -> None:
    for tensors in microbatches:  # of most data the first sample tells
        no_targets = len(tensors) < 2
        if no_targets or bool((tensors[1] != IGNORE).any()):
            return
    raise UserError(
        f"data.kind={config.data.kind}: none of its {name} targets counts, all are {IGNORE}: nothing can be learnt or "
        f"measured; mark the targets that count"
    )


def place_model(config: Config, source: Source, model: nn.Module, world: World) -> None:
    """Move the model to this process's device, ready to compute. Raises UserError if a user's can't be trained.

    An outline has memory then, and no weights yet.
    """
    pin(config, world.device)
    if next(model.parameters()).is_meta:
        give_memory(model, world.device)
    model.to(world.device)
    if isinstance(config.model, Own):
        samples = range(min(config.batch.micro_size, len(source.train)))
        first = source.train[list(samples)]
        with autocast_for(config, world.device):
            try_out(model, config.model, [x.to(world.device) for x in first])
    prepare(config, model)


def context_of(config: Config, source: Source, model: nn.Module, world: World) -> StepContext:
    """Make what computes the steps of this config. Call `place_model` first."""
    batch = config.batch
    # Only with batch.per_process_size does the global size depend on the world.
    global_size = config.global_size(world.size)
    sizes = len(source.train), config.seed, global_size, batch.micro_size, tuple(batch.double_at)
    plan = MixedPlan(*sizes, mixture=source.mixture) if source.mixture else BatchPlan(*sizes)
    own = partial(OwnUpdate, config.optimizer) if isinstance(config.optimizer, Own) else None
    return make_context(config, model, plan, world, autocast_for(config, world.device), own)


def equalize(context: StepContext) -> None:
    """Take rank 0's weights and tables: each process has computed its own, which may differ between machines."""
    model, world = context.model, context.world
    # The same seed gives the same bits on equal machines only, and what differs here would differ in all steps.
    world.take_from_main([*model.parameters(), *model.buffers()])
    # Now, since torch's allocator may hold the rest of the GPU later, and gives nothing back when NCCL asks.
    if world.size > 1 and world.comm_device.type == "cuda":
        update = context.update
        warm_up(world, max(len(bucket.weights) for bucket in update.buckets), bool(update.of_muon or update.own))


def batches_of(config: Config, source: Source, context: StepContext, start: int) -> Iterator[Sequence[Tensor]]:
    """Start the data loader. Yields the tensors of this process's microbatches. start: steps done before."""
    work = RankSampler(context.plan, context.microbatches, start, config.train.max_steps)
    return load(source.train, work, config.data.workers, config.world.timeout_seconds, context.device)


def graphs_of(config: Config, context: StepContext) -> Graphs | None:
    """What decides which microbatches are replayed; None: none is."""
    wanted, reduction, device = config.train.cuda_graphs, context.reduction, context.device.type
    if wanted is False or (wanted == "auto" and device not in RECORDERS):
        return None
    reason = f"this process computes on {device}"
    if device in RECORDERS:
        reason = why_no_graph(config, context.world.size) or ""
    if not reason and isinstance(reduction, ExactReduction):
        # Processes that share a GPU ask for its free memory at the same time.
        return Graphs(context, reduction, gpu_part() if wanted == "auto" else None, say)
    if context.world.is_main:
        say(f"train.cuda_graphs: microbatches are computed without a graph: {reason}")
    return None
