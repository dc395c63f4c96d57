"""The live display of a run on a terminal: where it is, how fast, and what is safe."""

import math
import sys
import time
from collections.abc import Callable

import psutil
import torch
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mingpt.observe.events import (
    AttemptEnded,
    AttemptFailed,
    AttemptStarted,
    Evaluated,
    Event,
    HotCommitted,
    SnapshotCommitted,
    SnapshotLost,
    StepComputed,
    TasksEvaluated,
)
from mingpt.observe.ledger import duration

PER_SECOND = 2  # how often it is drawn: more would cost training time
FAST, SLOW = 0.1, 0.02  # weights of a new value in the two running means, whose difference is the trend
LEAST_TREND = 0.002  # of the loss; less is drawn as level


class Mean:
    """A running mean; the first values count alike, so that it does not start at 0."""

    def __init__(self, weight: float) -> None:
        self.weight, self.value, self.count = weight, 0.0, 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(self.weight, 1 / self.count) * (value - self.value)


class LiveLine:
    """Draws itself in a thread of rich's. What else is printed appears above it.

    flops, peak: of a token, and of all processes in a second; None: unknown. price: per hour. spent: what earlier
    attempts and this one's start have cost.
    """

    def __init__(
        self,
        console: Console,
        *,
        flops: int | None = None,
        peak: float | None = None,
        price: float | None = None,
        spent: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.flops, self.peak, self.price, self.spent, self.now = console, flops, peak, price, spent, now
        self.started: AttemptStarted | None = None
        self.step, self.began, self.last = 0, now(), now()
        self.fast, self.slow, self.seconds = Mean(FAST), Mean(SLOW), Mean(FAST)
        self.val_loss = self.best = math.nan
        self.durable = self.hot = self.lost = 0
        self.live = Live(
            console=console,
            get_renderable=self.draw,
            refresh_per_second=PER_SECOND,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # otherwise it goes to a log, as it is
        )

    def wants(self, step: int) -> bool:
        return False

    def on(self, event: Event) -> None:
        match event:
            case AttemptStarted():
                self.started, self.step, self.last = event, event.start, self.now()
                self.live.start()
                self.console.show_cursor(True)  # a process that is killed could not bring it back
            case StepComputed():
                self.seconds.add(self.now() - self.last)
                self.step, self.last = event.step, self.now()
                if math.isfinite(event.loss):
                    self.fast.add(event.loss)
                    self.slow.add(event.loss)
            case Evaluated():
                self.val_loss, self.best, self.last = event.val_loss, event.best, self.now()
            case SnapshotCommitted():
                self.durable, self.lost = event.step, 0
            case TasksEvaluated():
                self.last = self.now()
            case HotCommitted():
                self.hot = event.step
            case SnapshotLost():
                self.lost = event.in_a_row
            case AttemptEnded() | AttemptFailed():
                self.live.stop()

    def draw(self) -> Group | Text:
        start = self.started
        if start is None:
            return Text("")
        line = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=start.last_step, completed=self.step, width=20)
        line.add_row(bar, *(Text(part, no_wrap=True) for part in self.first_line(start)))
        return Group(line, Text("  ".join(self.second_line(start)), style="dim", no_wrap=True, overflow="ellipsis"))

    def first_line(self, start: AttemptStarted) -> list[str]:
        change = (self.fast.value - self.slow.value) / max(abs(self.slow.value), 1e-9)
        trend = "→" if abs(change) < LEAST_TREND else "↓" if change < 0 else "↑"
        parts = [f"step {self.step}/{start.last_step}", f"loss {self.fast.value:.4f} {trend}"]
        if math.isfinite(self.val_loss):
            parts.append(f"val {self.val_loss:.4f} (best {self.best:.4f})")
        if self.seconds.value:
            rate = start.tokens_per_step / self.seconds.value
            parts.append(f"{rate:,.0f} tokens/s")
            if self.flops and self.peak:
                what = "MFU" if start.device != "cpu" else "of matmul"
                parts.append(f"{rate * self.flops / self.peak:.0%} {what}")
            parts.append(f"{duration((start.last_step - self.step) * self.seconds.value)} left")
        return parts

    def second_line(self, start: AttemptStarted) -> list[str]:
        parts = [f"attempt {start.attempt}", f"{start.world_size} x {start.device}", f"{memory() / 2**30:.1f} GiB"]
        parts.append(f"durable {self.durable or 'none yet'}" + (f", hot {self.hot}" if self.hot > self.durable else ""))
        if self.lost:
            parts.append(f"{self.lost} SNAPSHOTS LOST")
        if self.price is not None:
            so_far = self.spent + (self.now() - self.began) / 3600 * self.price
            rest = (start.last_step - self.step) * self.seconds.value / 3600 * self.price
            parts.append(f"cost {so_far:.2f}, {so_far + rest:.2f} at the end")
        return parts


def memory() -> int:
    """Bytes in use: of the GPU, as torch counts them, or of this process."""
    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else psutil.Process().memory_info().rss
