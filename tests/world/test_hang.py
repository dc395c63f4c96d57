"""The watchdog: what a process says of itself, what all of them together mean, and when it is no hang."""

import json
import os
import subprocess
import sys
import threading
import time as clock
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from config_kit import configured
from mingpt.errors import CRASHED
from mingpt.world import hang, hangreport
from mingpt.world.hang import Watchdog
from mingpt.world.hangreport import Report, locate, summary
from mingpt.world.lifetime import Lifetime, Phase
from mingpt.world.world import Progress, World
from paths_kit import KITS, ROOT
from told import Told

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
        {0: report(11), 1: report(10, "train/stats.py:70", "n2", recent=SKIPPED), 2: report(11)},
        set(),
    ),
    "all of nine": ({r: report(12, f"data/shards.py:{r}") for r in range(9)}, set()),
}


@pytest.mark.parametrize("name", HANGS)
def test_the_summary_names_who_holds_the_others_up(name: str, told: Told) -> None:
    told(summary(*HANGS[name]))


Where = tuple[str, set[str]]


def inside(file: Path, call: Callable[[], Where]) -> Callable[[], Where]:
    """A function that seems to be in this file, and calls `call` in its line 2."""
    space: dict[str, Any] = {"call": call}
    exec(compile("def outer():\n    return call()\n", str(file), "exec"), space)
    return cast(Callable[[], Where], space["outer"])


def where() -> Where:
    return locate(sys._getframe().f_back)


PACKAGE = Path(hangreport.PACKAGE)
TASK = Path(getattr(find_spec("lm_eval"), "origin", "")).parent / "api/task.py"
THREADING, DYNAMO = Path(threading.__file__), Path(torch.__file__).parent / "_dynamo/convert_frame.py"


@pytest.mark.parametrize("library", [THREADING, DYNAMO, Path("<frozen runpy>")])
def test_a_place_is_the_innermost_line_that_is_ours_or_the_users(library: Path) -> None:
    mine = Path("/home/me/words/rows.py")
    assert inside(PACKAGE / "data/own.py", inside(mine, inside(library, where)))()[0] == "words/rows.py:2"
    assert inside(mine, inside(PACKAGE / "data/shards.py", inside(library, where)))()[0] == "data/shards.py:2"


def test_what_takes_long_is_known_by_who_waits_for_it() -> None:
    assert DYNAMO.exists(), "torch has moved it: the watchdog would take a compiler for a hang"
    assert TASK.exists(), "lm-eval has moved it: the watchdog would take a long task for a hang"
    inner, slow = PACKAGE / "storage.py", {"snapshot"}
    snapshot, loop, run = (PACKAGE / f for f in ("snapshot/writer.py", "train/loop.py", "train/run.py"))
    harness, evaluator = PACKAGE / "train/harness.py", TASK.parents[1] / "evaluator.py"
    assert inside(loop, inside(snapshot, where))() == ("snapshot/writer.py:2", slow)
    assert inside(loop, inside(snapshot, inside(inner, where)))() == ("storage.py:2", slow)
    # But not what a snapshot asks the loop for.
    assert inside(loop, inside(snapshot, inside(run, where)))() == ("train/run.py:2", set())
    assert inside(run, inside(DYNAMO, where))() == ("train/run.py:2", {"compile"})
    # The questions of a task take long to write, but not to answer.
    assert inside(run, inside(TASK, where))() == ("train/run.py:2", {"tasks"})
    assert inside(evaluator, inside(harness, where))() == ("train/harness.py:2", set())


# --- two watchdogs of one process, with a real store between them, and a clock of their own ---


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(hang, "time", made)
    return made


@pytest.fixture
def pair(time: Time) -> tuple[Watchdog, Watchdog]:
    """The watchdogs of two processes in training, whose threads are not started. The second is this process's."""
    config = configured("health.hang_seconds=100")
    lifetime, store = Lifetime(), dist.HashStore()
    lifetime.phase = Phase.TRAINING
    worlds = [World(r, 2, r, torch.device("cpu"), "gloo", store=store) for r in (0, 1)]
    one, two = (Watchdog(config, world, lifetime, lambda error: None) for world in worlds)
    return one, two


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
def beats(time: Time, pair: tuple[Watchdog, Watchdog]) -> Beats:
    return Beats(time, pair[0])


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


def test_a_gpu_that_waits_too_long_for_a_slow_process_ends_before_nccl_does(
    beats: Beats, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other process makes progress, so it is no hang; gloo has this limit itself, NCCL ends with SIGABRT."""
    dog = beats.dog
    codes, told = list[int](), list[str]()
    monkeypatch.setattr(hang.os, "_exit", codes.append)
    dog.lifetime.failed = lambda error: told.append(type(error).__name__)
    monkeypatch.setattr(hang, "NO_ANSWER", "no answer")
    for device, overdue in (("cpu", False), ("cuda", True)):
        dog.world = replace(dog.world, device=torch.device(device))
        for seconds, late in ((590, False), (20, overdue)):  # world.timeout_seconds=600
            assert not beats(seconds, GOES_ON)
            assert dog.overdue is late, (device, seconds)
        dog._done = (-1, -1)  # progress
    dog.overdue = True
    monkeypatch.setattr(dog, "hangs", lambda: False)
    dog._look_out()
    hang.faulthandler.cancel_dump_traceback_later()
    assert (codes, told) == ([CRASHED], ["Hang"])
    assert ": no answer (600 s; in " in capfd.readouterr().err


def test_reports_go_through_the_store(pair: tuple[Watchdog, Watchdog]) -> None:
    one, two = pair
    one._asking = True
    talking = [threading.Thread(target=dog._talk, daemon=True) for dog in (two, one)]
    try:
        for thread in talking:
            thread.start()
        for _ in range(100):
            if 1 in one.reports:
                break
            threading.Event().wait(0.1)
    finally:
        for dog in pair:
            dog.stopped.set()
    assert one.reports[1] == two.reports[1]
    assert 0 not in two.reports or two.reports[0] != one.reports[1]


class Broken:
    def set(self, key: str, value: str) -> None:
        raise RuntimeError("the store is gone\nC++ stack")


def test_without_a_store_each_process_decides_alone(beats: Beats) -> None:
    beats.dog.world = replace(beats.dog.world, store=Broken())  # type: ignore[arg-type]
    beats.dog._talk()
    assert beats.dog.trouble == "the store is gone"
    assert beats(110)


HANG = """
import tempfile, time
from mingpt.errors import CRASHED
from mingpt.world import hang, hangreport
from mingpt.world.lifetime import Lifetime, Phase
from config_kit import configured
from snapshot_kit import ALONE
tempfile.tempdir = "/nowhere"  # no folder for files: the disk is full
lifetime = Lifetime()
lifetime.phase = Phase.TRAINING
with hang.watched(configured("health.hang_seconds=1"), ALONE, lifetime):
    time.sleep(60)
"""


def test_a_disk_that_is_full_does_not_save_a_process_that_hangs() -> None:
    """Where its stacks and its reason can't be written, it says so, and ends."""
    unusable = {"TORCHELASTIC_ERROR_FILE": "/nowhere/error.json", "PYTHONPATH": f"{KITS}:{ROOT}"}
    command = [sys.executable, "-c", HANG]
    ended = subprocess.run(command, env={**os.environ, **unusable}, capture_output=True, text=True, timeout=600)
    assert ended.returncode == CRASHED, ended.stderr
    assert "error: the run hangs: rank 0 on" in ended.stderr
    assert "/nowhere/error.json" in ended.stderr
    assert 'File "<string>", line' in ended.stderr  # the stacks


def test_the_watching_goes_on_after_an_error(
    pair: tuple[Watchdog, Watchdog], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    dog, _ = pair
    looks = list[int]()

    def hangs() -> bool:
        looks.append(1)
        if len(looks) == 5:
            dog.stopped.set()
        raise OSError("no space left")

    dog.beat_seconds = 0.01
    monkeypatch.setattr(dog, "hangs", hangs)
    dog._watch()
    assert len(looks) == 5
    assert capfd.readouterr().err.count("OSError: no space left") == 1


def test_who_tells_of_the_hang_ends_first(
    pair: tuple[Watchdog, Watchdog], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher ends the others as soon as one has ended."""
    ended, told = list[str](), threading.Event()

    def tell(error: BaseException) -> None:
        told.wait(60)

    monkeypatch.setattr(hang, "time", clock)
    monkeypatch.setattr(hang.os, "_exit", lambda code: ended.append(threading.current_thread().name))
    for dog in pair:
        dog.silence_seconds, dog.beat_seconds, dog._asking = 0.2, 0.05, True
        dog.reports |= {0: report(3), 1: report(3)}
        dog.failed = tell
    pair[0].heard[1] = pair[1].heard[0] = pair[0].awake
    talking = [threading.Thread(target=dog._talk, daemon=True) for dog in pair]
    ending = [threading.Thread(target=dog._end, args=[dog._tell], name=str(dog.world.rank)) for dog in pair]
    for thread in (*talking, *ending):
        thread.start()
    ending[1].join(1)  # more than it needs to end
    assert ended == []
    told.set()
    for thread in ending:
        thread.join(60)
    assert ended == ["0", "1"]
    assert capfd.readouterr().err.count("error: the run hangs") == 1
    for dog in pair:
        dog.stopped.set()
