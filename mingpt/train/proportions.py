"""How much data a run has, takes a step, and sees in all: said at the start, before hours are spent on it."""

from collections.abc import Iterator

from mingpt.compute.batches import BatchPlan
from mingpt.config.schema import Config
from mingpt.data.source import Source
from mingpt.data.windows import WindowDataset

MANY_EPOCHS = 50  # beyond which a model learns the data by heart


def proportions(plan: BatchPlan, source: Source, config: Config) -> Iterator[str]:
    """One line of proportions, and one for each that looks like a slip."""
    what, size, block = "samples", len(source.train), 1
    if isinstance(source.train, WindowDataset):  # overlapping samples: what counts are the tokens of the text
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
