"""Says at an attempt's start what it will compute, and which of its figures look like an error."""

from collections.abc import Iterator

from mingpt.cli.console import counted, say
from mingpt.compute.batches import BatchPlan
from mingpt.compute.mixture import MixedPlan
from mingpt.compute.numerics import slow_precision
from mingpt.config.schema import Config
from mingpt.data.mixed import MixedSamples
from mingpt.data.source import Source, sampled_split
from mingpt.data.windows import WindowDataset
from mingpt.train.context import StepContext
from mingpt.train.evaluation import evaluated_part

MANY_EPOCHS = 50  # with more, a model memorises its data


def announce(config: Config, context: StepContext, source: Source, attempt: int, start: int) -> None:
    """Say it in lines of the log. start: steps done before. Called by rank 0."""
    plan, world = context.plan, context.world
    parameters = sum(p.numel() for p in context.model.parameters())
    least = f"{plan.micro_size >> len(plan.double_at)} to " if plan.double_at else ""
    say(
        f"attempt {attempt}: steps {start + 1} to {config.train.max_steps}, "
        f"{counted(world.size, 'process')} on {context.device.type} ({world.backend}), "
        f"{counted(plan.microbatches, 'microbatch')} of {least}{plan.micro_size} x {config.model.block_size} "
        f"tokens, {parameters:,} parameters"
    )
    if config.reduce == "fast":
        say("reduce=fast: equal bits for another number of processes are not promised")
    if slow := slow_precision(config, context.device):
        say(slow)
    for line in proportions(plan, source, config):
        say(line)


def proportions(plan: BatchPlan, source: Source, config: Config) -> Iterator[str]:
    """One line of figures of each data set, and a WARNING for each that looks like an error."""
    steps = config.train.max_steps
    sets = [("", source.train, plan.seen(steps) / steps)]
    if isinstance(plan, MixedPlan) and isinstance(source.train, MixedSamples):
        shown = zip(source.train.parts, plan.shown(steps), strict=True)
        sets = [(f" of {key}", samples, number / steps) for (key, _, samples), number in shown]
    for of, samples, taken in sets:
        what, size = "samples", len(samples)
        if isinstance(samples, WindowDataset):
            # A window begins at each token, so there are about as many samples as tokens: those say nothing of epochs.
            what = "tokens"
            size = samples.stop - samples.start
            taken *= config.model.block_size
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
    if len(split := source.validation):
        part, total = evaluated_part(split, config.train.eval_batches), sampled_split(split).size
        every = min(config.train.eval_every or steps, steps)
        work = len(part) / (3 * every * plan.microbatches)  # forward alone is a third of a step
        which = f"all {total:,}" if part.size == total else f"{part.size:,} of {total:,}"
        yield (
            f"validation: {which} samples every {counted(every, 'step')}, about {work / (1 + work):.0%} of the time "
            f"(train.eval_batches)"
        )
    if config.schedule.warmup_steps >= config.train.max_steps:
        yield (
            f"WARNING: schedule.warmup_steps={config.schedule.warmup_steps}, but train.max_steps="
            f"{config.train.max_steps}: the learning rate never reaches optimizer.lr"
        )


def count(number: int) -> str:
    return f"{number / 1e9:,.1f} G" if number >= 1e9 else f"{number / 1e6:,.1f} M" if number >= 1e6 else f"{number:,}"
