"""Prints at the start how much data the run has, how much a step takes, and how many epochs that makes."""

from collections.abc import Iterator

from mingpt.compute.batches import BatchPlan
from mingpt.compute.mixture import MixedPlan
from mingpt.config.schema import Config
from mingpt.console import counted
from mingpt.data.mixture import MixedSamples
from mingpt.data.source import Source
from mingpt.data.windows import WindowDataset
from mingpt.train.evaluation import first_microbatches

MANY_EPOCHS = 50  # with more, a model memorises its data


def proportions(plan: BatchPlan, source: Source, config: Config) -> Iterator[str]:
    """One line of figures of each data set, and a WARNING for each that looks like an error."""
    steps, sets = config.train.max_steps, [("", source.train, float(plan.global_size))]
    if isinstance(plan, MixedPlan) and isinstance(source.train, MixedSamples):
        shown = zip(source.train.parts, plan.shown(steps), strict=True)
        sets = [(f" of {key}", samples, number / steps) for (key, _, samples), number in shown]
    for of, samples, taken in sets:
        what, size = "samples", len(samples)
        if isinstance(samples, WindowDataset):  # its samples overlap, so tokens are counted
            what, size, taken = "tokens", samples.stop - samples.start, taken * config.model.block_size
        epochs = steps * taken / size
        yield (
            f"data: {count(size)} {what}{of}, {count(round(taken))} a step, "
            f"{epochs:,.{1 if epochs < 100 else 0}f} epochs"
        )
        if epochs > MANY_EPOCHS:
            yield (
                f"WARNING: {epochs:,.0f} epochs{of}: a model that sees its data so often learns it by heart: take more "
                f"data, or lower train.max_steps"
            )
    if total := len(source.validation):
        number = len(first_microbatches(source.validation, config.train.most_eval_batches(config.batch)))
        every = counted(config.train.eval_every or steps, "step")
        which = "all" if number == total else f"the first {number:,} of"
        yield f"validation: {which} {counted(total, 'microbatch')} every {every} (train.eval_batches)"
    if config.schedule.warmup_steps >= config.train.max_steps:
        yield (
            f"WARNING: schedule.warmup_steps={config.schedule.warmup_steps}, but train.max_steps="
            f"{config.train.max_steps}: the learning rate never reaches optimizer.lr"
        )


def count(number: int) -> str:
    return f"{number / 1e9:,.1f} G" if number >= 1e9 else f"{number / 1e6:,.1f} M" if number >= 1e6 else f"{number:,}"
