"""A process that is slower than the others for some minutes is named once, with its machine."""

import pytest

from mingpt.observe.events import StepDone
from mingpt.observe.stragglers import WINDOW_SECONDS, Stragglers

Seconds = tuple[float, ...]
FAST, NONE, SLOW = (1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0), (1.0, 2.0, 1.0, 1.0)


class Steps:
    """Steps of two seconds each, by a clock of its own."""

    def __init__(self, ratio: float = 1.5, shares: tuple[int, ...] = (2, 2, 2, 2)) -> None:
        self.now, self.lines = 1000.0, list[str]()
        self.observer = Stragglers(("n1", "n1", "n2", "n3"), shares, ratio, self.lines.append, lambda: self.now)

    def windows(self, count: float, busy: Seconds, waited: Seconds = NONE) -> list[str]:
        """What has been said then."""
        for _ in range(round(count * WINDOW_SECONDS / 2)):
            self.now += 2
            self.observer.on(StepDone(1, 2.0, 1.0, busy, waited))
        return self.lines


def test_a_slow_process_is_named_once() -> None:
    steps = Steps()
    assert steps.windows(0.9, SLOW) == []
    line = "SLOW: rank 1 on n1 is 1,000 ms computing for each microbatch, against a median of 500 ms (over 3 min)"
    assert steps.windows(0.1, SLOW) == [line]
    for busy in (SLOW, FAST) * 8:
        assert steps.windows(1, busy) == [line]


@pytest.mark.parametrize(
    ("steps", "busy", "waited", "said"),
    [
        (Steps(), FAST, (0.01, 0.01, 0.3, 0.01), ["SLOW: rank 2 on n2 is 150 ms waiting for data"]),
        (Steps(shares=(3, 3)), (1.0, 1.8), (0.0, 0.0), ["SLOW: rank 1 on n1 is 600 ms computing"]),
        (Steps(), FAST, (0.001, 0.001, 0.05, 0.001), []),  # fifty times the median
        (Steps(ratio=2.0), (1.0, 1.0, 1.0, 1.8), NONE, []),
        (Steps(shares=(1, 1, 1, 2)), (1.0, 1.0, 1.0, 2.0), NONE, []),  # with more microbatches
    ],
)
def test_who_is_slow(steps: Steps, busy: Seconds, waited: Seconds, said: list[str]) -> None:
    assert [line.partition(" for each")[0] for line in steps.windows(9, busy, waited)] == said
