"""The live display of a run on a terminal: where it is, how fast, and what is safe."""

import math
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mingpt.observe.events import (
    AttemptEnded,
    AttemptFailed,
    AttemptStarted,
    Evaluated,
    Evaluating,
    Event,
    HotCommitted,
    SnapshotCommitted,
    SnapshotLost,
    StepDone,
)
from mingpt.observe.ledger import duration

PER_SECOND = 2  # how often it is drawn: more would cost training time
FAST, SLOW = 0.1, 0.02  # weights of a new value in the two running means, whose difference is the trend
LEAST_TREND = 0.002  # of the loss; less is drawn as level
BAR = 20  # characters


class Mean:
    """A running mean; the first values count alike, so that it does not start at 0."""

    def __init__(self, weight: float) -> None:
        self.weight, self.value, self.count = weight, 0.0, 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(self.weight, 1 / self.count) * (value - self.value)


def fitted(fields: Sequence[tuple[int, str]], width: int) -> str:
    """The fields that fit into a line, in their order, those of a low number first; none is cut.

    Each begins with the spaces between it and the one before.
    """
    chosen, room = set[int](), width
    for place, (_, text) in sorted(enumerate(fields), key=lambda field: field[1][0]):
        room -= len(text)
        if room < 0:
            break
        chosen.add(place)
    return "".join(text for place, (_, text) in enumerate(fields) if place in chosen).lstrip()


class LiveLine:
    """Draws itself in a thread of rich's. What else is printed appears above it.

    price: per hour. spent: what earlier attempts and this one's start have cost.
    """

    def __init__(
        self,
        console: Console,
        *,
        price: float | None = None,
        spent: float = 0.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.price, self.spent, self.now, self.began = console, price, spent, now, now()
        self.started: AttemptStarted | None = None
        self.done: StepDone | None = None
        self.evaluated: Evaluated | None = None
        self.evaluating: Evaluating | None = None
        self.fast, self.slow = Mean(FAST), Mean(SLOW)
        self.durable = self.hot = self.lost = 0
        self.live = Live(
            console=console,
            get_renderable=self.draw,
            refresh_per_second=PER_SECOND,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # otherwise it goes to a log, as it is
        )

    def on(self, event: Event) -> None:
        match event:
            case AttemptStarted():
                self.started = event
                self.live.start()
                self.console.show_cursor(True)  # a process that is killed could not bring it back
            case StepDone():
                self.done, self.evaluating = event, None
                if math.isfinite(event.loss):
                    self.fast.add(event.loss)
                    self.slow.add(event.loss)
            case Evaluating():
                self.evaluating = event
            case Evaluated():
                self.evaluated, self.evaluating = event, None
            case SnapshotCommitted():
                self.durable, self.lost = event.step, 0
            case HotCommitted():
                self.hot = event.step
            case SnapshotLost():
                self.lost = event.in_a_row
            case AttemptEnded() | AttemptFailed():
                self.live.stop()

    def draw(self) -> Text:
        if self.started is None:
            return Text("")
        first, second = self.first_line(self.started), self.second_line(self.started)
        # The first field's two spaces are not shown. One column stays free, since some terminals begin a new line then.
        lines = [fitted(fields, self.console.width + 1) for fields in (first, second)]
        return Text("\n").join([Text(lines[0]), Text(lines[1], style="dim")])

    def first_line(self, start: AttemptStarted) -> list[tuple[int, str]]:
        done, change = self.done, (self.fast.value - self.slow.value) / max(abs(self.slow.value), 1e-9)
        step = done.step if done else start.start
        bar = "━" * (BAR * step // start.last_step)
        fields = [(9, f"  {bar:─<{BAR}}"), (0, f"  step {step}/{start.last_step}")]
        if self.evaluating:
            fields.append((1, f"  evaluating {self.evaluating.share:.0%}"))
        if self.fast.count:
            trend = "→" if abs(change) < LEAST_TREND else "↓" if change < 0 else "↑"
            fields += [(2, f"  loss {self.fast.value:.4f}"), (7, f" {trend}")]
        if self.evaluated:
            fields += [(3, f"  val {self.evaluated.val_loss:.4f}"), (8, f" (best {self.evaluated.best:.4f})")]
        if done:
            fields.append((4, f"  {done.tokens_per_second:,.0f} tokens/s"))
            if done.mfu is not None:
                fields.append((6, f"  {done.mfu:.0%} MFU"))
            fields.append((5, f"  {duration(done.seconds_left)} left"))
        return fields

    def second_line(self, start: AttemptStarted) -> list[tuple[int, str]]:
        done, snapshot = self.done, f"snapshot {self.durable}" if self.durable else "no snapshot yet"
        fields = [(3, f"  attempt {start.attempt}"), (6, f"  {start.world_size} x {start.device}")]
        fields.append((1, f"  {snapshot}"))
        if self.hot > self.durable:
            fields.append((2, f" (in memory {self.hot})"))
        if self.lost:
            fields.append((0, f"  {self.lost} SNAPSHOTS LOST"))
        if done:
            fields += [(5, f"  {done.peak_memory / 2**30:.1f} GiB"), (7, f"  {done.tokens_seen:,} tokens")]
        if self.price is not None:
            so_far = self.spent + (self.now() - self.began) / 3600 * self.price
            rest = done.seconds_left / 3600 * self.price if done else 0.0
            fields.append((4, f"  cost {so_far:.2f}, {so_far + rest:.2f} at the end"))
        return fields
