"""Events of a run, and the observers that turn them into a console line, a file, a curve, or what you write.

An observer makes no decision for the run. What all processes must do alike is part of the step or of the loop.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from mingpt.cli.console import Say
from mingpt.cli.redact import redacted

END_SECONDS = 20.0  # for an observer, at the end of an attempt
OPEN_SECONDS = 120.0  # more for a tracker that has not opened by then (a slow disk, a far server), of a finished run
# For all observers: each keeps a shorter limit itself, and says what it has lost.
LIMIT_SECONDS = 30.0
FIRST_SECONDS = 5.0  # of these for the first observer, which may publish an event itself (trace.py)
TURN_SECONDS = 0.05  # most are done by then, so that what they print comes in their order


@dataclass(frozen=True)
class AttemptStarted:
    """Before the first step. start: steps done before it. host: of rank 0."""

    attempt: int
    start: int
    last_step: int
    world_size: int
    device: str
    host: str


@dataclass(frozen=True)
class StepDone:
    """Each step, one step late on CUDA. step: the number of steps done.

    loss: nats per token. grad_norm: before clipping; not finite: a skipped step. busy, waited: (W,) seconds of each
    process in the step before this one: computing its microbatches, and waiting for their data.
    logged: every train.log_every-th step, and the last one. step_seconds, tokens_per_second: of training only, averaged
    over the steps since the last logged one. tokens_seen: by the run so far. seconds_left: with evaluations and
    snapshots, as far as this attempt can tell. peak_memory: bytes of rank 0. mfu: None where the peak is not known.
    """

    step: int
    loss: float
    grad_norm: float
    busy: tuple[float, ...] = ()
    waited: tuple[float, ...] = ()
    logged: bool = True
    lr: float = 0.0
    tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    tokens_seen: int = 0
    seconds_left: float = 0.0
    peak_memory: int = 0
    mfu: float | None = None
    world_size: int = 1

    @property
    def curves(self) -> dict[str, float]:
        """What metrics and trackers get of it, by name."""
        inner = ("step", "busy", "waited", "logged")
        return {name: value for name, value in vars(self).items() if name not in inner and value is not None}


@dataclass(frozen=True)
class StepSkipped:
    """A step that left the state as it was; on CUDA this comes one step late. in_a_row: skipped steps up to this one.

    spike: the loss is too high, and finite. microbatches: those that are not finite, or that of the highest loss; none:
    the gradient is not finite though all losses are. samples: of these microbatches.
    """

    step: int
    loss: float
    grad_norm: float
    in_a_row: int
    spike: bool
    microbatches: tuple[int, ...]
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Evaluating:
    """After each microbatch of rank 0. share: what is done. seconds: since the evaluation began."""

    step: int
    share: float
    seconds: float


@dataclass(frozen=True)
class Evaluated:
    """val_loss: nats per token. best: the lowest so far, including this one. right: correct answers to `questions`.

    parts: the loss on each component of a mixture. bits_per_byte: of the validation text; None: it is no text.
    tokens: the targets that it was measured on. share: of the split's samples.
    """

    step: int
    val_loss: float
    best: float
    right: int = 0
    questions: int = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    bits_per_byte: float | None = None
    tokens: float = 0.0
    share: float = 1.0

    @property
    def accuracy(self) -> float | None:
        return self.right / self.questions if self.questions else None

    @property
    def curves(self) -> dict[str, float]:
        """What of it is a curve, by name."""
        more = {"val_accuracy": self.accuracy, "val_bits_per_byte": self.bits_per_byte}
        parts = {f"val_loss/{name}": loss for name, loss in self.parts.items()}
        measured = {"val_loss": self.val_loss, "val_tokens": self.tokens, "val_share": self.share}
        return measured | {k: v for k, v in more.items() if v is not None} | parts


@dataclass(frozen=True)
class Sampled:
    """text: what the weights of this step make of train.sample_prompt, with which it begins."""

    step: int
    text: str


@dataclass(frozen=True)
class SnapshotCommitted:
    """A snapshot is durable. Published by the snapshot writer's thread. seconds: from the copy to the commit."""

    step: int
    digest: str
    seconds: float


@dataclass(frozen=True)
class HotCommitted:
    """A hot snapshot is in the memory of rank 0's node. Published by the hot writer's thread."""

    step: int


@dataclass(frozen=True)
class SnapshotLost:
    """A durable snapshot could not be stored, and the run goes on. Published by the snapshot writer's thread."""

    step: int
    in_a_row: int
    reason: str


@dataclass(frozen=True)
class BitsDiffer:
    """A step that an attempt before had computed has other bits now, although nothing that they depend on has changed.

    before: that attempt. loss, grad_norm: as that attempt recorded them, and as this one has computed them.
    """

    step: int
    attempt: int
    before: int
    loss: tuple[float, float]
    grad_norm: tuple[float, float]


@dataclass(frozen=True)
class AttemptFailed:
    """An exception ends the attempt. code: the exit code. error: the exception's class, such as RolledBack."""

    step: int
    code: int
    error: str
    reason: str


@dataclass(frozen=True)
class AttemptEnded:
    """digest: of the last step's snapshot; None: that is not durable."""

    step: int
    finished: bool
    digest: str | None


Event = (
    AttemptStarted
    | StepDone
    | StepSkipped
    | Evaluating
    | Evaluated
    | Sampled
    | SnapshotCommitted
    | HotCommitted
    | SnapshotLost
    | BitsDiffer
    | AttemptFailed
    | AttemptEnded
)


class Observer(Protocol):
    def on(self, event: Event) -> None:
        """Called in rank 0 only. An observer that the config names (`observers`): in a thread of its own, in order.

        One of this package's: in the main thread; with an event of a snapshot in that writer's thread.

        With AttemptEnded and AttemptFailed in another thread: an observer may then wait for what it has sent, for
        END_SECONDS.
        """


class Observers:
    """Passes each event to every observer. One that raises is reported once and switched off; it never ends a run."""

    def __init__(self, observers: Sequence[Observer], say: Say) -> None:
        self._observers, self._say = list(observers), say

    def publish(self, event: Event) -> None:
        if isinstance(event, (SnapshotLost, AttemptFailed)):
            # An error's text may hold anything, and observers write it into files and send it away.
            event = replace(event, reason=redacted(event.reason))
        if isinstance(event, (AttemptEnded, AttemptFailed)):
            self._publish_end(event)
            return
        for observer in self._observers:
            self._pass(event, observer)

    def _publish_end(self, event: Event) -> None:
        limit = LIMIT_SECONDS
        if isinstance(event, AttemptEnded) and event.finished:
            limit += OPEN_SECONDS
        until, waiting = time.monotonic() + limit, dict[threading.Thread, Observer]()
        for turn, observer in enumerate(self._observers):
            thread = threading.Thread(target=self._pass, args=[event, observer], daemon=True)
            waiting[thread] = observer
            thread.start()
            thread.join(TURN_SECONDS if turn else FIRST_SECONDS)
        for thread, observer in waiting.items():
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                self._switch_off(observer, TimeoutError(f"it did not end within {limit:g} s"))

    def _pass(self, event: Event, observer: Observer) -> None:
        try:
            observer.on(event)
        except Exception as error:
            self._switch_off(observer, error)

    def _switch_off(self, observer: Observer, error: Exception) -> None:
        # A new list, since the other thread may be iterating over the old one.
        self._observers = [other for other in self._observers if other is not observer]
        reason = str(error) or type(error).__name__
        self._say(f"OBSERVER {type(observer).__name__} failed and is switched off: {reason}")
