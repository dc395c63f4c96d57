"""Prints at the start how much data the run has, how much a step takes, and how many epochs that makes."""

from collections.abc import Iterator

from mingpt.compute.batches import BatchPlan
from mingpt.config.schema import Config
from mingpt.data.source import Source
from mingpt.data.windows import WindowDataset

MANY_EPOCHS = 50  # with more, a model memorises its data


def proportions(plan: BatchPlan, source: Source, config: Config) -> Iterator[str]:
    """One line of figures, and a WARNING for each that looks like an error."""
    what, size, block = "samples", len(source.train), 1
    if isinstance(source.train, WindowDataset):  # its samples overlap, so tokens are counted
        what, block = "tokens", config.model.block_size
        size = source.train.stop - source.train.start
    taken = plan.global_size * block
    epochs = config.train.max_steps * taken / size
    yield f"data: {count(size)} {what}, {count(taken)} a step, {epochs:,.{1 if epochs < 100 else 0}f} epochs"
    if epochs > MANY_EPOCHS:
        yield (
            f"WARNING: {epochs:,.0f} epochs: a model that sees its data so often learns it by heart: take more data, "
            f"or lower train.max_steps"
        )
    if config.schedule.warmup_steps >= config.train.max_steps:
        yield (
            f"WARNING: schedule.warmup_steps={config.schedule.warmup_steps}, but train.max_steps="
            f"{config.train.max_steps}: the learning rate never reaches optimizer.lr"
        )


def count(number: int) -> str:
    return f"{number / 1e9:,.1f} G" if number >= 1e9 else f"{number / 1e6:,.1f} M" if number >= 1e6 else f"{number:,}"
