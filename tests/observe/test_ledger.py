"""The ledger: all seconds of a run, along its lineage."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from mingpt.errors import UserError
from mingpt.observe.events import AttemptFailed, AttemptStarted, Event, StepDone
from mingpt.observe.ledger import (
    BETWEEN,
    TWICE,
    Account,
    Accountant,
    Ledger,
    accounts,
    ledger,
)
from mingpt.snapshot.attempts import REWIND, Attempt
from mingpt.world.clock import Clock

Written = tuple[int, int, int, int, int]  # attempt, the step before its first, its last step, started, until


def account(attempt: int, first: int, last: int, began: float, until: float, **more: float) -> Account:
    """Of `more`, what is left of the time is training."""
    spent = {"load": 10.0, **more}
    seconds = spent | {"step": until - began - sum(spent.values())}
    return Account(attempt, first, last, 2, "cpu", "n1", began, until, seconds)


def book(folder: Path, claims: list[tuple[int, int]], *known: Account) -> Ledger:
    """Claims attempts, by step and parent, writes accounts, and reads the ledger. Without an account: a rewind."""
    (folder / "ledger").mkdir()
    for number, (step, parent) in enumerate(claims, 1):
        by = "train" if number in [one.attempt for one in known] else REWIND
        Attempt.claim(str(folder), step, "d", parent, by=by)
    for one in known:
        (folder / f"ledger/attempt-{one.attempt:05d}.json").write_text(json.dumps(asdict(one)))
    return ledger(str(folder))


def test_all_seconds_add_up_to_the_wall_clock(tmp_path: Path) -> None:
    """Attempt 1 was killed after step 50, whose snapshot was that of step 40; attempt 3 found nothing newer than 60."""
    known = book(
        tmp_path,
        [(0, 0), (40, 1), (60, 2)],
        account(1, 0, 50, 1000, 1110),
        account(2, 40, 70, 1130, 1200, evaluation=30),
        account(3, 60, 100, 1300, 1350, wait=4),
    )
    assert known.wall == 350
    assert known.groups() == pytest.approx(
        {"training": 80 + 20 + 36, "start-up": 30, "data wait": 4, "snapshots": 0, "evaluation": 30, "other": 0}
        | {TWICE: 100 * 10 / 50 + 30 * 10 / 30, BETWEEN: 20 + 100}
    )


@pytest.mark.parametrize(
    ("claims", "known", "twice", "between"),
    [
        # Attempt 2 starts while 1 trains, and ends before it; 3 starts after both.
        ([(0, 0), (10, 1), (20, 2)], [(1, 0, 20, 0, 110), (2, 10, 20, 50, 80), (3, 20, 30, 120, 150)], 50, 10),
        # What a rewind gave up was trained for nothing.
        ([(0, 0), (20, 1), (20, 2)], [(1, 0, 100, 0, 110), (3, 20, 30, 110, 130)], 80, 0),
        # An attempt that was killed before it noted anything has what the next one found.
        ([(0, 0), (40, 1)], [(1, 0, 0, 0, 20), (2, 40, 50, 100, 120)], 0, 80),
    ],
)
def test_what_was_trained_for_nothing(
    tmp_path: Path, claims: list[tuple[int, int]], known: list[Written], twice: float, between: float
) -> None:
    found = book(tmp_path, claims, *(account(*one) for one in known))
    groups = found.groups()
    assert (groups[TWICE], groups[BETWEEN]) == pytest.approx((twice, between))
    assert (sum(groups.values()), found.wall) == (found.ran + between, known[-1][-1])


def test_an_account_is_written_while_the_run_lives(tmp_path: Path) -> None:
    now = [5.0]
    clock = Clock("import", lambda: now[0])
    accountant = Accountant(str(tmp_path), clock, 2.0, print, now=lambda: now[0] + 1000)

    def after(seconds: float, phase: str, *events: Event) -> Account:
        now[0] += seconds
        clock.enter(phase)
        for event in events:
            accountant.on(event)
        assert accountant.file
        accountant.file.flush()  # a thread does it once a second
        [known] = accounts(str(tmp_path))
        return known

    spent = {"import": 5.0, "step": 0.0}
    begun = after(5, "step", AttemptStarted(4, 100, 200, 8, "NVIDIA L4", "n7"))
    assert begun == Account(4, 100, 100, 8, "NVIDIA L4", "n7", 1005, 1010, spent, price=2.0)
    assert after(0.5, "wait", StepDone(101, 1.0, 1.0)).step == 100  # not with every step
    known = after(19.5, "step", StepDone(102, 1.0, 1.0))
    assert (known.step, known.until, known.end) == (102, 1030, None)
    assert sum(known.seconds.values()) == known.until - known.started
    assert after(0, "step", AttemptFailed(102, 70, "RuntimeError", "lost contact")).end == "failed: lost contact"
    assert ledger(str(tmp_path)).cost() == pytest.approx(2.0 * 25 / 3600)


GOOD = asdict(account(2, 0, 10, 0, 20))


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"[" * 100_000, b"x" * (1 << 21)]
    + [
        json.dumps(GOOD | changed).encode()
        for changed in (
            {"attempt": 3}, {"started": float("inf")}, {"until": 10**400}, {"step": -1}, {"seconds": [1]},
            {"world_size": True},
        )
    ],
)  # fmt: skip
def test_an_account_that_is_none_is_left_out_and_a_link_refused(tmp_path: Path, raw: bytes) -> None:
    book(tmp_path, [], account(1, 0, 10, 0, 20))
    (tmp_path / "ledger/attempt-00002.json").write_bytes(raw)
    (tmp_path / "ledger/notes.txt").write_text("mine")
    assert [a.attempt for a in accounts(str(tmp_path))] == [1]
    (tmp_path / "ledger/attempt-00003.json").symlink_to("attempt-00001.json")
    with pytest.raises(UserError, match="attempt-00003"):
        accounts(str(tmp_path))
