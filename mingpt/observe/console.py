"""Prints a line for each event."""

import math
from collections.abc import Sequence
from textwrap import indent

from mingpt.cli.console import Say
from mingpt.observe.events import (
    AttemptEnded,
    BitsDiffer,
    Evaluated,
    Evaluating,
    Event,
    Sampled,
    SnapshotCommitted,
    StepDone,
    StepSkipped,
)
from mingpt.observe.ledger import duration

MOST_COLUMNS = 99  # of a step's line
FIRST_SKIPS = 10  # in a row, which are all printed; then one in so many
MOST_SAMPLES = 16
FIRST_PROGRESS = 10.0  # seconds of an evaluation until its first line; the next one comes after twice the time


class ConsoleLines:
    """live: a live display shows each step and each snapshot; the lines that stay are those of few events."""

    def __init__(self, last_step: int, say: Say, live: bool = False) -> None:
        self.last_step, self.say, self.live = last_step, say, live
        self.patience = FIRST_PROGRESS

    def on(self, event: Event) -> None:
        if self.live and isinstance(event, (StepDone, SnapshotCommitted, Evaluating)):
            return
        match event:
            case StepDone(logged=True):
                self.say(step_line(event, self.last_step))
            case StepSkipped():
                if event.in_a_row <= FIRST_SKIPS or event.in_a_row % FIRST_SKIPS == 0:
                    self.say(skipped_line(event))
            case Evaluating():
                if event.seconds >= self.patience:
                    self.patience = 2 * event.seconds
                    self.say(f"step {event.step}: evaluating {event.share:.0%}")
            case Evaluated():
                self.patience = FIRST_PROGRESS
                self.say(evaluation_line(event))
            case Sampled():
                self.say(f"step {event.step}: sample\n{indent(event.text, '    ')}")
            case SnapshotCommitted():
                self.say(f"step {event.step}: snapshot {event.digest[:16]} in {event.seconds:.2f} s")
            case BitsDiffer():
                self.say(f"ALARM: {bits_line(event)}")
            case AttemptEnded():
                self.say(ended_line(event))


def fitting(fields: Sequence[str], width: int) -> str:
    """One line of the first fields, each of them whole: as many as `width` columns have room for, and at least one."""
    line = fields[0]
    for field in fields[1:]:
        if len(f"{line}  {field}") > width:
            break
        line = f"{line}  {field}"
    return line


def step_line(event: StepDone, last_step: int) -> str:
    """`step  100/2000  loss 2.3456  lr 1.00e-03  norm 0.85  6 min 39 s left  12,345 tokens/s  …`."""
    fields = [
        f"step {event.step:>{len(str(last_step))}}/{last_step}",
        f"loss {event.loss:.4f}",
        f"lr {event.lr:.2e}",
        f"norm {event.grad_norm:.2f}",
        f"{duration(event.seconds_left)} left",
        f"{event.tokens_per_second:,.0f} tokens/s",
    ]
    if not math.isfinite(event.grad_norm):
        fields.insert(1, "SKIPPED")
    if event.mfu is not None:
        fields.append(f"{event.mfu:.1%} MFU")
    return fitting([*fields, f"{event.peak_memory / 2**30:.2f} GiB"], MOST_COLUMNS)


def skipped_line(event: StepSkipped) -> str:
    line = f"step {event.step}: SKIPPED ({event.in_a_row} in a row): loss {event.loss:.4f}, norm {event.grad_norm:.2f}"
    if not event.microbatches:
        return f"{line}: the gradient is not finite, though all losses are"
    shown = ", ".join(map(str, event.samples[:MOST_SAMPLES]))
    samples = f"samples {shown}{', …' if len(event.samples) > MOST_SAMPLES else ''}"
    numbers = ", ".join(map(str, event.microbatches))
    if event.spike:
        return f"{line}: the loss is a spike, highest in microbatch {numbers} ({samples})"
    return f"{line}: the loss of microbatch {numbers} is not finite ({samples})"


def evaluation_line(event: Evaluated) -> str:
    line = f"step {event.step}: validation loss {event.val_loss:.4f} (best {event.best:.4f})"
    if event.bits_per_byte is not None:
        line += f", {event.bits_per_byte:.4f} bits per byte"
    if event.accuracy is not None:
        line += f", accuracy {event.accuracy:.2%} ({event.right} of {event.questions})"
    if event.share < 1:
        line += f", on {event.share:.1%} of the split"
    return ", ".join([line, *(f"{name} {loss:.4f}" for name, loss in event.parts.items())])


def ended_line(event: AttemptEnded) -> str:
    what = "finished" if event.finished else "stopped on request"
    return f"{what}: step {event.step}, digest {event.digest or 'not stored'}"


def bits_line(event: BitsDiffer) -> str:
    (loss, now), (norm, norm_now) = event.loss, event.grad_norm
    return (
        f"step {event.step} has other bits than before: loss {loss!r} and norm {norm!r} in attempt {event.before}, "
        f"loss {now!r} and norm {norm_now!r} in attempt {event.attempt}. Nothing that bits depend on has changed, so "
        f"one of the machines is sick: run `mingpt preflight` on both"
    )
