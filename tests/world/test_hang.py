"""The watchdog: what a process says of itself, what all of them together mean, and when it is no hang."""

import os
import subprocess
import sys
import threading
import time as clock
from collections.abc import Callable
from dataclasses import replace
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
from mingpt.world.lifetime import Lifetime, Phase, leave_reason
from mingpt.world.world import Progress, World
from paths_kit import KITS, ROOT

NAMES = ["all_gather", "all_to_all", "all_gather"] * 20


def report(collectives: int, place: str = "train/step.py:30", host: str = "n1", **changes: object) -> Report:
    recent = NAMES[:collectives][-32:]
    return replace(Report(host, 1, True, collectives, recent, place), **changes)  # type: ignore[arg-type]


def test_the_summary_names_who_has_not_entered_what_and_where_it_is() -> None:
    reports = {0: report(12), 1: report(10, "data/shards.py:61", "n3"), 2: report(12)}
    assert summary(reports, set()) == "rank 1 on n3 has not entered all_to_all #11; it is in data/shards.py:61"


def test_the_summary_names_who_does_not_answer_and_what_it_last_entered() -> None:
    text = summary({0: report(12), 1: report(12, host="n2")}, {1})
    assert text.startswith("rank 1 on n2 does not answer")
    assert text.endswith("its last known collective is all_gather #12")
    assert "rank 2 does not answer" in summary({0: report(12)}, {2})


def test_the_summary_names_who_has_left_out_a_collective() -> None:
    names = NAMES[:9]
    skipped = report(10, "train/stats.py:70", "n2", recent=[*names[:6], *names[7:], "all_gather", "all_to_all"])
    text = summary({0: report(11), 1: skipped, 2: report(11)}, set())
    assert text.startswith(
        "rank 1 on n2 has entered all_to_all as #7, where others have entered all_gather: one of them"
    )


def test_the_summary_of_a_hang_of_all() -> None:
    text = summary({r: report(12, f"data/shards.py:{r}") for r in range(9)}, set())
    assert text.startswith("rank 0 on n1 last entered all_gather #12, and is in data/shards.py:0; rank 1")
    assert "rank 4" not in text


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


def test_a_wait_for_a_snapshot_takes_long_but_not_what_it_asks_the_loop_for() -> None:
    snapshot, loop = PACKAGE / "snapshot/writer.py", PACKAGE / "train/loop.py"
    assert inside(loop, inside(snapshot, where))() == ("snapshot/writer.py:2", {"snapshot"})
    assert inside(loop, inside(snapshot, inside(PACKAGE / "storage.py", where)))() == ("storage.py:2", {"snapshot"})
    assert inside(loop, inside(snapshot, inside(PACKAGE / "train/run.py", where)))() == ("train/run.py:2", set())


def test_a_compiler_takes_long() -> None:
    assert DYNAMO.exists(), "torch has moved it: the watchdog would take a compiler for a hang"
    assert inside(PACKAGE / "train/step.py", inside(DYNAMO, where))() == ("train/step.py:2", {"compile"})


def test_the_questions_of_a_task_take_long_to_write_but_not_to_answer() -> None:
    assert TASK.exists(), "lm-eval has moved it: the watchdog would take a long task for a hang"
    assert inside(PACKAGE / "train/run.py", inside(TASK, where))() == ("train/run.py:2", {"tasks"})
    harness = PACKAGE / "train/harness.py"
    assert inside(TASK.parents[1] / "evaluator.py", inside(harness, where))() == ("train/harness.py:2", set())


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


def beat(time: Time, dog: Watchdog, seconds: float, others: dict[int, Report]) -> bool:
    """Some beats of the watchdog's thread, in which the others say the same again and again; whether it hangs then."""
    hangs = False
    for _ in range(int(seconds / dog.beat_seconds)):
        time.now += dog.beat_seconds
        for rank, said in others.items():
            raw = hang.json.dumps(hang.asdict(replace(said, beat=int(time.now * 10)))).encode()
            dog._hear([rank], [raw])
        hangs = dog.hangs()
    return hangs


def test_it_is_a_hang_once_no_process_makes_progress(time: Time, pair: tuple[Watchdog, Watchdog]) -> None:
    dog, _ = pair
    assert not beat(time, dog, 95, {1: report(3)})
    assert beat(time, dog, 10, {1: report(3)})


def test_it_is_no_hang_while_another_process_makes_progress(time: Time, pair: tuple[Watchdog, Watchdog]) -> None:
    dog, _ = pair
    assert not beat(time, dog, 1000, {1: report(3, stuck=False)})


def test_a_process_that_is_silent_makes_no_progress(time: Time, pair: tuple[Watchdog, Watchdog]) -> None:
    dog, _ = pair
    assert not beat(time, dog, 95, {1: report(3, stuck=False)})
    assert beat(time, dog, dog.silence_seconds + 10, {})
    assert dog.silent() == {1}


@pytest.mark.parametrize("what", ["collectives", "microbatches"])
def test_progress_begins_the_time_anew(
    what: str, time: Time, pair: tuple[Watchdog, Watchdog], monkeypatch: pytest.MonkeyPatch
) -> None:
    dog, _ = pair
    assert not beat(time, dog, 60, {1: report(3)})
    monkeypatch.setattr(Progress, what, getattr(Progress, what) + 1)
    assert not beat(time, dog, 60, {1: report(3)})
    assert beat(time, dog, 60, {1: report(3)})


def test_a_process_that_was_stopped_for_hours_goes_on(time: Time, pair: tuple[Watchdog, Watchdog]) -> None:
    """SIGSTOP, Slurm's suspend, a laptop's lid: the whole node has slept, and nobody else has waited."""
    dog, _ = pair
    assert not beat(time, dog, 50, {1: report(3)})
    time.now += 7200
    assert not beat(time, dog, 20, {1: report(3)})
    assert beat(time, dog, 50, {1: report(3)})


def test_the_first_step_has_more_time(time: Time, pair: tuple[Watchdog, Watchdog]) -> None:
    dog, _ = pair
    dog.lifetime.phase = Phase.JOINED
    assert not beat(time, dog, 690, {1: report(3)})  # health.hang_seconds and world.timeout_seconds (600)
    assert beat(time, dog, 20, {1: report(3)})


def test_a_gpu_that_waits_too_long_for_a_slow_process_ends_before_nccl_does(
    time: Time, pair: tuple[Watchdog, Watchdog], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other process makes progress, so it is no hang; gloo has this limit itself, NCCL ends with SIGABRT."""
    dog, _ = pair
    codes, told = list[int](), list[str]()
    monkeypatch.setattr(hang.os, "_exit", codes.append)
    dog.lifetime.failed = lambda error: told.append(type(error).__name__)
    monkeypatch.setattr(hang, "NO_ANSWER", "no answer")
    for device, overdue in (("cpu", False), ("cuda", True)):
        dog.world = replace(dog.world, device=torch.device(device))
        for seconds, late in ((590, False), (20, overdue)):  # world.timeout_seconds=600
            assert not beat(time, dog, seconds, {1: report(3, stuck=False)})
            assert dog.overdue is late, (device, seconds)
        dog._done = (-1, -1)  # progress
    dog.overdue = True
    monkeypatch.setattr(dog, "hangs", lambda: False)
    dog._look_out()
    hang.faulthandler.cancel_dump_traceback_later()
    assert (codes, told) == ([CRASHED], ["Hang"])
    assert "error: rank 0 on" in (said := capfd.readouterr().err)
    assert ": no answer (600 s; in " in said


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


def test_without_a_store_each_process_decides_alone(time: Time, pair: tuple[Watchdog, Watchdog]) -> None:
    dog, _ = pair
    dog.world = replace(dog.world, store=Broken())  # type: ignore[arg-type]
    dog._talk()
    assert dog.trouble == "the store is gone"
    assert beat(time, dog, 110, {})


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


def test_a_report_begins_on_a_line_of_its_own(
    time: Time, pair: tuple[Watchdog, Watchdog], capfd: pytest.CaptureFixture[str]
) -> None:
    """Also while faulthandler writes a line of another process, in pieces, to the same pipe."""
    dog, _ = pair
    beat(time, dog, 110, {})
    os.write(2, b'  File "some')
    dog._dump()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == '  File "some'
    assert lines[1].startswith(f"rank 0 on {dog.host}: no progress for 100 s ")


def test_who_holds_its_interpreter_lock_prints_later_than_the_others_and_before_they_end(
    pair: tuple[Watchdog, Watchdog], monkeypatch: pytest.MonkeyPatch
) -> None:
    dog, _ = pair
    limits = list[float]()
    monkeypatch.setattr(hang.faulthandler, "dump_traceback_later", lambda seconds, file: limits.append(seconds))
    dog.arm()
    assert limits == [100 + dog.silence_seconds / 2]


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
        dog.silence_seconds, dog._asking = 0.2, True
        dog.reports |= {0: report(3), 1: report(3)}
        dog.failed = tell
    pair[0].heard[1] = pair[1].heard[0] = pair[0].awake
    talking = [threading.Thread(target=dog._talk, daemon=True) for dog in pair]
    ending = [threading.Thread(target=dog._end, args=[dog._tell], name=str(dog.world.rank)) for dog in pair]
    for thread in (*talking, *ending):
        thread.start()
    ending[1].join(2)  # more than it needs to end
    assert ended == []
    told.set()
    for thread in ending:
        thread.join(60)
    assert ended == ["0", "1"]
    assert capfd.readouterr().err.count("error: the run hangs") == 1
    for dog in pair:
        dog.stopped.set()


def test_the_first_reason_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the watchdogs end the processes, each loses the others, and would leave that as its reason."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for reason in ("the run hangs", "lost contact with another process"):
        leave_reason(reason)
    assert "the run hangs" in (tmp_path / "error.json").read_text()
