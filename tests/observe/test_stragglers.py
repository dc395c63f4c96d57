"""A process that is slower than the others for some minutes is named once, with its machine, and when that is over."""

from mingpt.observe.events import StepDone
from mingpt.observe.stragglers import CALM_WINDOWS, REMIND_SECONDS, WINDOW_SECONDS, Stragglers

HOSTS = ("n1", "n1", "n2", "n3")
FAST = (1.0, 1.0, 1.0, 1.0)
NONE = (0.0, 0.0, 0.0, 0.0)


class Steps:
    """Steps of `seconds` each, by a clock of its own."""

    def __init__(self, ratio: float = 1.5, shares: tuple[int, ...] = (2, 2, 2, 2), seconds: float = 2.0) -> None:
        self.now, self.seconds, self.lines = 1000.0, seconds, list[str]()
        self.observer = Stragglers(HOSTS, shares, ratio, self.lines.append, lambda: self.now)

    def windows(self, count: float, busy: tuple[float, ...] = FAST, waited: tuple[float, ...] = NONE) -> list[str]:
        """What is said meanwhile."""
        before = len(self.lines)
        for _ in range(round(count * WINDOW_SECONDS / self.seconds)):
            self.now += self.seconds
            self.observer.on(StepDone(1, 2.0, 1.0, busy, waited))
        return self.lines[before:]


def test_a_slow_process_is_named_once_with_its_machine() -> None:
    steps = Steps()
    assert steps.windows(0.9, (1.0, 1.0, 1.0, 1.8)) == []
    [line] = steps.windows(5, (1.0, 1.0, 1.0, 1.8))
    assert line == (
        "SLOW: rank 3 on n3 is 900 ms computing for each microbatch, against a median of 500 ms (over 3 min)"
    )


def test_a_process_that_waits_for_its_data_is_named() -> None:
    [line] = Steps().windows(3, FAST, (0.01, 0.01, 0.3, 0.01))
    assert line.startswith("SLOW: rank 2 on n2 is 150 ms waiting for data")


def test_it_is_named_again_each_hour_and_when_it_is_over() -> None:
    steps = Steps()
    slow = (1.0, 2.0, 1.0, 1.0)
    assert len(steps.windows(1, slow)) == 1
    assert [line.split(" 1,")[0] for line in steps.windows(2 * REMIND_SECONDS / WINDOW_SECONDS, slow)] == [
        "SLOW: rank 1 on n1 is still"
    ] * 2
    assert steps.windows(CALM_WINDOWS - 1) == []
    assert steps.windows(1) == ["rank 1 on n1 is no longer slow (computing)"]
    assert len(steps.windows(1, slow)) == 1


def test_now_and_then_is_no_flood() -> None:
    steps = Steps()
    lines = [line for _ in range(8) for line in (*steps.windows(1, (1.0, 2.0, 1.0, 1.0)), *steps.windows(1))]
    assert len(lines) == 1


def test_what_no_run_loses_time_by_is_not_said() -> None:
    assert Steps().windows(9, (1.0, 1.0, 1.0, 1.4)) == []
    assert Steps().windows(9, FAST, (0.001, 0.001, 0.05, 0.001)) == []  # fifty times the median
    assert Steps(ratio=2.0).windows(9, (1.0, 1.0, 1.0, 1.8)) == []


def test_a_process_with_more_microbatches_is_not_slow() -> None:
    assert Steps(shares=(1, 1, 1, 2)).windows(9, (1.0, 1.0, 1.0, 2.0)) == []


def test_of_two_processes_the_slower_one_is_named() -> None:
    steps = Steps(shares=(3, 3))
    assert [line[:16] for line in steps.windows(2, (1.0, 1.8), (0.0, 0.0))] == ["SLOW: rank 1 on "]
