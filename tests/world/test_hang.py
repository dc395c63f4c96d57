"""The watchdog: what a process says of itself, what all of them together mean, and when it is no hang."""

import json
import sys
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from mingpt.compute.optimizer import Update
from mingpt.errors import CRASHED, FINISHED
from mingpt.snapshot.writer import SnapshotWriter
from mingpt.train.attempt import attempt
from mingpt.train.context import StepContext
from mingpt.world import hangreport, liveness
from mingpt.world.clock import Clock, compiler_named
from mingpt.world.hangreport import Report, locate, summary
from mingpt.world.lifetime import Lifetime, Phase
from mingpt.world.liveness import Watchdog
from mingpt.world.world import Progress, World
from tests.kits.config_kit import configured
from tests.kits.run_kit import NewRun
from tests.kits.told import Told

NAMES = ["all_gather", "all_to_all", "all_gather"] * 20


def report(collectives: int, place: str = "train/step.py:30", host: str = "n1", **changes: object) -> Report:
    recent = NAMES[:collectives][-32:]
    return replace(Report(host, 1, True, collectives, recent, place), **changes)  # type: ignore[arg-type]


SKIPPED = [*NAMES[:6], *NAMES[7:9], "all_gather", "all_to_all"]  # it has left out the seventh
HANGS = {
    "has not entered": ({0: report(12), 1: report(10, "data/shards.py:61", "n3"), 2: report(12)}, set[int]()),
    "does not answer": ({0: report(12), 1: report(12, host="n2")}, {1}),
    "has never answered": ({0: report(12)}, {2}),
    "has left one out": (
        {0: report(11), 1: report(10, "compute/stats.py:70", "n2", recent=SKIPPED), 2: report(11)},
        set(),
    ),
    "all of nine": ({r: report(12, f"data/shards.py:{r}") for r in range(9)}, set()),
}


@pytest.mark.parametrize("name", HANGS)
def test_the_summary_names_who_holds_the_others_up(name: str, told: Told) -> None:
    told(summary(*HANGS[name]))


def inside(*files: Path) -> str:
    """Where a process seems to be whose innermost functions are in these files, each at its line 2."""
    call: Any = lambda: locate(sys._getframe(1))  # noqa: E731
    for file in reversed(files):
        space = {"call": call}
        exec(compile("def outer():\n    return call()\n", str(file), "exec"), space)
        call = space["outer"]
    return str(call())


PACKAGE = Path(hangreport.PACKAGE)
THREADING, TORCH = Path(threading.__file__), Path(torch.__file__)


@pytest.mark.parametrize("library", [THREADING, TORCH, Path("<frozen runpy>")])
def test_a_place_is_the_innermost_line_that_is_ours_or_the_users(library: Path) -> None:
    mine, ours = Path("/home/me/words/rows.py"), PACKAGE / "data/shards.py"
    assert inside(ours, mine, library) == "words/rows.py:2"
    assert inside(mine, ours, library) == "data/shards.py:2"


# --- a watchdog with a real store and a clock of its own ---


class Time:
    """A clock of its own for the watchdog."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Beats:
    """One watchdog of two, and its clock."""

    time: Time
    dog: Watchdog

    def __call__(self, seconds: float, *others: Report) -> bool:
        """Some beats of its thread, in which the other says the same again and again; whether it hangs then."""
        hangs = False
        for _ in range(int(seconds / self.dog.beat_seconds)):
            self.time.now += self.dog.beat_seconds
            for said in others:
                raw = json.dumps(asdict(replace(said, beat=int(self.time.now * 10)))).encode()
                self.dog._hear([1], [raw])
            hangs = self.dog.hangs()
        return hangs


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> Beats:
    """The watchdog of a process in training, whose threads are not started."""
    monkeypatch.setattr(liveness, "time", time := Time())
    (lifetime := Lifetime()).phase = Phase.TRAINING
    world = World(0, 2, 0, torch.device("cpu"), "gloo", store=dist.HashStore())
    return Beats(time, Watchdog(configured("health.hang_seconds=100"), world, lifetime, print))


STUCK, GOES_ON = report(3), report(3, stuck=False)


def test_it_is_a_hang_once_no_process_makes_progress(beats: Beats) -> None:
    assert not beats(95, STUCK)
    assert beats(10, STUCK)
    assert not beats(1000, GOES_ON)  # it waits for a slower one


def test_a_process_that_is_silent_makes_no_progress(beats: Beats) -> None:
    assert not beats(95, GOES_ON)
    assert beats(beats.dog.silence_seconds + 10)
    assert beats.dog.silent() == {1}


@pytest.mark.parametrize("what", ["collectives", "microbatches"])
def test_progress_begins_the_time_anew(what: str, beats: Beats, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not beats(60, STUCK)
    monkeypatch.setattr(Progress, what, getattr(Progress, what) + 1)
    assert not beats(60, STUCK)
    assert beats(60, STUCK)


def test_a_process_that_was_stopped_for_hours_goes_on(beats: Beats) -> None:
    """SIGSTOP, Slurm's suspend, a laptop's lid: the whole node has slept, and nobody else has waited."""
    assert not beats(50, STUCK)
    beats.time.now += 7200
    assert not beats(20, STUCK)
    assert beats(50, STUCK)


def test_the_first_step_has_more_time(beats: Beats) -> None:
    beats.dog.lifetime.phase = Phase.JOINED
    assert not beats(690, STUCK)  # health.hang_seconds and world.timeout_seconds (600)
    assert beats(20, STUCK)


@pytest.mark.parametrize(("phase", "seconds"), [("snapshot", 3700), ("compile", 700), ("evaluation", 100)])
def test_what_may_take_long_has_more_time(phase: str, seconds: int, beats: Beats) -> None:
    """Six times world.timeout_seconds (600) more, and once, whatever file the process is in."""
    with beats.dog.lifetime.clock.within(phase):
        assert not beats(seconds - 10, STUCK)
        assert beats(20, STUCK)
    beats.dog._done = (-1, -1)  # progress
    assert not beats(90, STUCK)
    assert beats(20, STUCK)


def test_the_clock_knows_when_torch_compiles() -> None:
    """In a step whose microbatch has another shape, and in the first evaluation, long after the first step."""
    clock, phases = Clock("step"), list[str]()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        phases.append(clock.phase)
        return graph.forward

    double = torch.compile(lambda x: 2 * x, backend=backend, dynamic=False)
    with compiler_named(clock):
        double(torch.ones(2))
        with clock.within("evaluation"):
            double(torch.ones(3))
            phases.append(clock.phase)
        phases.append(clock.phase)
    double(torch.ones(4))
    assert phases == ["compile", "compile", "evaluation", "step", "step"]


def test_a_wait_for_a_snapshot_is_told_from_a_wait_for_the_device(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot asks for the state and the loss, and so waits for the step on the device: that has no more time."""
    lifetime, phases = Lifetime(), dict[str, set[str]]()

    def noted(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread() and lifetime.phase is Phase.TRAINING:
                phases.setdefault(name, set()).add(lifetime.clock.phase)
            return plain(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    noted(SnapshotWriter, "start")
    noted(SnapshotWriter, "wait_until_idle")
    noted(StepContext, "state")
    noted(Update, "skipped_in_a_row")
    assert attempt(new_run("snapshot.asynchronous=false").arguments(), lifetime) == FINISHED
    assert phases == {
        "start": {"snapshot"},
        "wait_until_idle": {"snapshot"},
        "state": {"step"},
        "skipped_in_a_row": {"step"},
    }


def test_a_gpu_that_waits_too_long_for_a_slow_process_ends_before_nccl_does(
    beats: Beats, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other process makes progress, so it is no hang; gloo has this limit itself, NCCL ends with SIGABRT."""
    dog = beats.dog
    codes = list[int]()
    monkeypatch.setattr(liveness, "exit_now", codes.append)
    for device in ("cpu", "cuda"):
        dog.world = replace(dog.world, device=torch.device(device))
        late = [beats(590, GOES_ON), dog.overdue, beats(20, GOES_ON), dog.overdue]  # world.timeout_seconds=600
        assert late == [False, False, False, device == "cuda"]
        dog._done = (-1, -1)  # progress
    dog.overdue = True
    monkeypatch.setattr(dog, "hangs", lambda: False)
    dog._look_out()
    liveness.faulthandler.cancel_dump_traceback_later()
    assert codes == [CRASHED]
    assert "world.timeout_seconds" in capfd.readouterr().err


def test_without_a_store_each_process_decides_alone(beats: Beats) -> None:
    gone = Mock(**{"set.side_effect": RuntimeError("the store is gone\nC++ stack")})
    beats.dog.world = replace(beats.dog.world, store=gone)
    beats.dog._talk()
    assert beats.dog.trouble == "the store is gone"
    assert beats(110)


def test_the_watching_goes_on_where_memory_is_too_short_for_faulthandlers_thread(
    beats: Beats, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dog, hangs = beats.dog, Mock(return_value=False)

    def no_thread(*arguments: object, **options: object) -> None:
        if hangs.call_count == 3:
            dog.stopped.set()
        raise RuntimeError("unable to start watchdog thread")

    monkeypatch.setattr("faulthandler.dump_traceback_later", no_thread)
    monkeypatch.setattr(dog, "hangs", hangs)
    dog.beat_seconds = 0
    dog._watch()
    assert hangs.call_count == 4
    assert capsys.readouterr().err.count("unable to start watchdog thread") == 1
