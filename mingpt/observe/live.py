"""The live display of a run on a terminal: where it is, how fast, and what is safe."""

import sys

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mingpt.observe.console import fitting
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


class LiveLine:
    """Draws itself in a thread of rich's. What else is printed appears above it."""

    def __init__(self, console: Console) -> None:
        self.started: AttemptStarted | None = None
        self.done: StepDone | None = None
        self.evaluated: Evaluated | None = None
        self.evaluating: Evaluating | None = None
        self.durable = self.hot = self.lost = 0
        self.console = console
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
        """Two lines, of the fields that the window has room for."""
        shown = Text(no_wrap=True, overflow="ellipsis")
        if start := self.started:
            shown.append(fitting(self.progress(start), self.console.width))
            shown.append(f"\n{fitting(self.state(start), self.console.width)}", "dim")
        return shown

    def progress(self, start: AttemptStarted) -> list[str]:
        done = self.done
        fields = [f"step {done.step if done else start.start}/{start.last_step}"]
        if self.evaluating:
            fields.append(f"evaluating {self.evaluating.share:.0%}")
        if done:
            fields.append(f"loss {done.loss:.4f}")
        if self.evaluated:
            fields.append(f"val {self.evaluated.val_loss:.4f}")
        if done:
            fields += [f"{duration(done.seconds_left)} left", f"{done.tokens_per_second:,.0f} tokens/s"]
            fields += [f"{done.mfu:.0%} MFU"] if done.mfu is not None else []
        if self.evaluated and self.evaluated.best != self.evaluated.val_loss:
            fields.append(f"best val {self.evaluated.best:.4f}")
        return fields

    def state(self, start: AttemptStarted) -> list[str]:
        fields = [f"{self.lost} SNAPSHOTS LOST"] if self.lost else []
        fields.append(f"snapshot {self.durable}" if self.durable else "no snapshot yet")
        if self.hot > self.durable:
            fields.append(f"(in memory {self.hot})")
        fields += [f"attempt {start.attempt}", f"{start.world_size} x {start.device}"]
        if self.done:
            fields += [f"{self.done.peak_memory / 2**30:.1f} GiB", f"{self.done.tokens_seen:,} tokens"]
        return fields
