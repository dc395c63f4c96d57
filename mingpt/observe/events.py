"""What happens in a run, as small records, and those that watch it.

An observer turns events into a console line, a file, a curve. It watches and decides nothing: whatever a run must do
alike in all its processes is part of the step or of the loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class StepDone:
    """step: how many steps are done. loss: nats a token. grad_norm: before clipping; not finite: the step was skipped.

    step_seconds: of training alone, averaged over the steps since the last event.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    step_seconds: float
    world_size: int


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
class Evaluated:
    """val_loss: nats a token. best: the lowest so far, this one included. right: answers, of so many questions."""

    step: int
    val_loss: float
    best: float
    right: int = 0
    questions: int = 0

    @property
    def accuracy(self) -> float | None:
        return self.right / self.questions if self.questions else None


@dataclass(frozen=True)
class SnapshotCommitted:
    """A durable snapshot. Comes from the snapshot writer's thread. seconds: from the copy to the commit."""

    step: int
    digest: str
    seconds: float


@dataclass(frozen=True)
class AttemptEnded:
    """digest: of the last step's durable snapshot; None: it is not durable."""

    step: int
    finished: bool
    digest: str | None


Event = StepDone | StepSkipped | Evaluated | SnapshotCommitted | AttemptEnded


class Observer(Protocol):
    def wants(self, step: int) -> bool:
        """Whether this observer needs StepDone of this step. For its figures the host waits for the device."""

    def on(self, event: Event) -> None:
        """Called in rank 0 only; SnapshotCommitted comes in the writer's thread, all others in the main thread."""


class Observers:
    """Hands each event to every observer. One that fails is named once and switched off; it never ends a run."""

    def __init__(self, observers: Sequence[Observer], say: Callable[[str], None]) -> None:
        self._observers, self._say = list(observers), say

    def wants(self, step: int) -> bool:
        wanted = False
        for observer in self._observers:
            try:
                wanted = observer.wants(step) or wanted
            except Exception as error:
                self._switch_off(observer, error)
        return wanted

    def publish(self, event: Event) -> None:
        for observer in self._observers:
            try:
                if not isinstance(event, StepDone) or observer.wants(event.step):
                    observer.on(event)
            except Exception as error:
                self._switch_off(observer, error)

    def _switch_off(self, observer: Observer, error: Exception) -> None:
        # A new list: the other thread may be going through the old one.
        self._observers = [other for other in self._observers if other is not observer]
        what = str(error) or type(error).__name__
        self._say(f"OBSERVER {type(observer).__name__} failed and is switched off: {what}")
