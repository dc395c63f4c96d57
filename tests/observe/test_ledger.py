"""The ledger: all seconds of a run, along its lineage."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mingpt.errors import UserError
from mingpt.observe import ledger as module
from mingpt.observe.events import AttemptEnded, AttemptFailed, AttemptStarted, SnapshotCommitted, StepDone
from mingpt.observe.ledger import (
    BETWEEN,
    TWICE,
    Account,
    Accountant,
    accounts,
    duration,
    goodput_line,
    launched,
    ledger,
)
from mingpt.snapshot.attempts import REWIND, Attempt
from mingpt.world.clock import Clock


def account(attempt: int, steps: tuple[int, int], times: tuple[float, float], **more: float) -> Account:
    """Of `more`, what is left of the time is training."""
    spent = {"load": 10.0, **more}
    seconds = spent | {"step": times[1] - times[0] - sum(spent.values())}
    return Account(attempt, *steps, 2, "cpu", "n1", *times, seconds)


def put(run_dir: Path, *known: Account) -> None:
    (run_dir / "ledger").mkdir(exist_ok=True)
    for one in known:
        (run_dir / f"ledger/attempt-{one.attempt:05d}.json").write_text(json.dumps(asdict(one)))


def test_all_seconds_add_up_to_the_wall_clock(tmp_path: Path) -> None:
    """Attempt 1 was killed after step 50, whose snapshot was that of step 40; attempt 3 found nothing newer than 60."""
    assert [Attempt.claim(str(tmp_path), step, "d", parent).number for step, parent in ((0, 0), (40, 1), (60, 2))]
    put(
        tmp_path,
        account(1, (0, 50), (1000, 1110)),
        account(2, (40, 70), (1130, 1200), evaluation=30),
        account(3, (60, 100), (1300, 1350), wait=4),
    )
    known = ledger(str(tmp_path))
    assert known.wall == 350
    assert known.seconds[TWICE] == pytest.approx(100 * 10 / 50 + 30 * 10 / 30)
    assert known.seconds[BETWEEN] == 20 + 100
    assert known.groups() == pytest.approx(
        {"training": 80 + 20 + 36, "start-up": 30, "data wait": 4, "snapshots": 0, "evaluation": 30}
        | {TWICE: 30, BETWEEN: 120, "other": 0}
    )
    assert sum(known.groups().values()) == pytest.approx(known.wall)
    assert goodput_line(known) == (
        "goodput 59.1% of 3 min 50 s in 3 attempts; the rest: start-up 13.0%, evaluation 13.0%, computed twice 13.0%, "
        "data wait 1.7%; 38.9% of all 5 min 50 s, with the time between attempts"
    )


def test_attempts_that_overlap_add_up_to_the_time_of_both(tmp_path: Path) -> None:
    """Attempt 2 starts while 1 trains, and ends before it; 3 starts after both."""
    assert [Attempt.claim(str(tmp_path), step, "d", parent).number for step, parent in ((0, 0), (10, 1), (20, 2))]
    put(
        tmp_path,
        account(1, (0, 20), (0, 110)),
        account(2, (10, 20), (50, 80)),
        account(3, (20, 30), (120, 150)),
    )
    known = ledger(str(tmp_path))
    assert (known.wall, known.ran) == (150, 170)
    assert known.groups() == pytest.approx(
        {"training": 50 + 20 + 20, "start-up": 30, "data wait": 0, "snapshots": 0, "evaluation": 0}
        | {TWICE: 50, BETWEEN: 10, "other": 0}
    )
    assert goodput_line(known) == (
        "goodput 52.9% of 2 min 50 s in 3 attempts; the rest: computed twice 29.4%, start-up 17.6%; 60.0% of all "
        "2 min 30 s, with the time between attempts"
    )


def test_what_a_rewind_gave_up_was_trained_for_nothing(tmp_path: Path) -> None:
    for step, parent, by in ((0, 0, "train"), (20, 1, REWIND), (20, 2, "train")):
        Attempt.claim(str(tmp_path), step, "d", parent, by=by)
    put(tmp_path, account(1, (0, 100), (0, 110)), account(3, (20, 30), (110, 130)))
    assert ledger(str(tmp_path)).seconds[TWICE] == pytest.approx(80)


def test_an_attempt_that_led_nowhere_is_all_lost(tmp_path: Path) -> None:
    """Attempt 3 went on from what attempt 1 had left, as if there had been no attempt 2."""
    for step, parent in ((0, 0), (10, 1), (30, 1)):
        Attempt.claim(str(tmp_path), step, "d", parent)
    put(
        tmp_path,
        account(1, (0, 30), (0, 40)),
        account(2, (10, 20), (40, 60)),
        account(3, (30, 40), (60, 80)),
    )
    assert ledger(str(tmp_path)).seconds[TWICE] == pytest.approx(10)


def test_an_attempt_that_was_killed_before_it_noted_anything_has_what_the_next_one_found(tmp_path: Path) -> None:
    for step, parent in ((0, 0), (40, 1)):
        Attempt.claim(str(tmp_path), step, "d", parent)
    put(tmp_path, account(1, (0, 0), (0, 20)), account(2, (40, 50), (100, 120)))
    known = ledger(str(tmp_path))
    assert (known.seconds[TWICE], known.seconds["step"], known.seconds[BETWEEN]) == (0, 20, 80)


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock's start is that of the process."""
    monkeypatch.setattr(module, "launched", lambda began, before: began)


@pytest.mark.parametrize(("before", "start"), [(0, 100), (150, 170), (180, 200)])
def test_the_launcher_counts_for_its_first_attempt(
    monkeypatch: pytest.MonkeyPatch, before: float, start: float
) -> None:
    """It was started at 100, this process at 170, and its clock at 200."""
    agent = SimpleNamespace(create_time=lambda: 100.0)
    own = SimpleNamespace(create_time=lambda: 170.0, parent=lambda: agent)
    monkeypatch.setattr(psutil, "Process", lambda: own)
    monkeypatch.setitem(os.environ, "TORCHELASTIC_RUN_ID", "1")
    assert launched(200.0, before) == start
    monkeypatch.delitem(os.environ, "TORCHELASTIC_RUN_ID")
    assert launched(200.0, 0) == 170


@pytest.mark.usefixtures("unlaunched")
def test_an_account_is_written_while_the_run_lives(tmp_path: Path) -> None:
    now, wall = [5.0], [1005.0]
    clock = Clock("import", lambda: now[0])

    def go(phase: str, seconds: float) -> None:
        now[0] += seconds
        wall[0] += seconds
        clock.enter(phase)

    go("step", 5)
    accountant = Accountant(str(tmp_path), clock, 2.0, print, now=lambda: wall[0])
    started = AttemptStarted(4, 100, 200, 8, "NVIDIA L4", "n7")
    accountant.on(started)
    assert accountant.file
    write = accountant.file.flush  # a thread does it once a second
    write()
    expected = Account(
        4, 100, 100, 8, "NVIDIA L4", "n7", 1005, 1010, {"launch": 0.0, "import": 5.0, "step": 0.0}, price=2.0
    )
    assert accounts(str(tmp_path)) == [expected]
    go("wait", 0.5)
    accountant.on(StepDone(101, 1.0, 1.0, (), ()))
    write()
    assert accounts(str(tmp_path))[0].step == 100  # not with every step
    accountant.on(SnapshotCommitted(101, "d", 0.5))
    go("step", 19.5)
    accountant.on(StepDone(102, 1.0, 1.0, (), ()))
    write()
    (known,) = accounts(str(tmp_path))
    assert (known.step, known.until, known.snapshots, known.end) == (102, 1030, [(101, 1010.5, 0.5)], None)
    assert sum(known.seconds.values()) == known.until - known.started
    accountant.on(AttemptFailed(102, 70, "RuntimeError", "lost contact"))
    assert accounts(str(tmp_path))[0].end == "failed: lost contact"
    assert ledger(str(tmp_path)).cost() == pytest.approx(2.0 * 25 / 3600)


@pytest.mark.usefixtures("unlaunched")
def test_the_end_of_a_run_says_its_goodput(tmp_path: Path) -> None:
    said, now = list[str](), [0.0]
    clock = Clock("load", lambda: now[0])
    accountant = Accountant(str(tmp_path), clock, 36.0, said.append, now=lambda: now[0])
    now[0] = 25.0
    clock.enter("step")
    accountant.on(AttemptStarted(1, 0, 10, 1, "cpu", "n"))
    now[0] = 100.0
    accountant.on(AttemptEnded(10, True, "d"))
    assert said == ["goodput 75.0% of 1 min 40 s in 1 attempt, cost 1.00; the rest: start-up 25.0%"]


GOOD = asdict(account(2, (0, 10), (0, 20)))
INFINITE = float("inf")


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"{}", b"[" * 100_000, b'{"attempt": "1"}', b"x" * (1 << 21)]
    + [
        json.dumps(GOOD | changed).encode()
        for changed in (
            {"attempt": 3}, {"started": INFINITE}, {"until": float("nan")}, {"until": 10**400}, {"price": 1e300},
            {"step": -1}, {"step": 2.5}, {"seconds": {"step": 10**400}}, {"seconds": [1]}, {"end": 5}, {"device": None},
            {"snapshots": [[INFINITE, 1, 1]]}, {"snapshots": [[1, 1]]}, {"snapshots": 7}, {"world_size": True},
        )
    ],
)  # fmt: skip
def test_an_account_that_is_none_is_left_out(tmp_path: Path, raw: bytes) -> None:
    put(tmp_path, account(1, (0, 10), (0, 20)))
    (tmp_path / "ledger/attempt-00002.json").write_bytes(raw)
    (tmp_path / "ledger/notes.txt").write_text("mine")
    assert [a.attempt for a in accounts(str(tmp_path))] == [1]


def test_an_account_that_is_a_link_is_refused(tmp_path: Path) -> None:
    put(tmp_path, account(1, (0, 10), (0, 20)))
    (tmp_path / "ledger/attempt-00002.json").symlink_to("attempt-00001.json")
    with pytest.raises(UserError, match="attempt-00002"):
        accounts(str(tmp_path))


def test_a_run_without_accounts_has_an_empty_ledger(tmp_path: Path) -> None:
    known = ledger(str(tmp_path))
    assert (known.wall, known.goodput, known.cost()) == (0, 0, None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1 min"), (725, "12 min 5 s"), (12000, "3 h 20 min"), (187200, "2 d 4 h")],
)
def test_a_duration_is_read_at_a_glance(seconds: float, text: str) -> None:
    assert duration(seconds) == text
