"""A write that never returns (a dead mount), a thread that can't start: a snapshot in flight has a limit."""

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import run as start
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from mingpt.errors import CRASHED, FINISHED
from mingpt.snapshot import writer as writer_module
from mingpt.snapshot.reader import verify
from mingpt.snapshot.store import Store
from mingpt.tiers import checkpointer
from mingpt.train.attempt import attempt
from mingpt.world.env import Env
from mingpt.world.lifetime import Lifetime, Phase
from tests.kits.hook_kit import hook
from tests.kits.run_kit import NewRun, in_forks

ASYNCHRONOUS = ("train.eval_every=0", "snapshot.asynchronous=true", "snapshot.retry_seconds=0")


@contextmanager
def stuck(first: int, here: bool = True) -> Iterator[None]:
    """Writes from this step on never return, until the block ends. Then the writers' clock jumps. here: or else not."""
    late, over, plain = threading.Event(), threading.Event(), Store.write_part
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6 * late.is_set(), sleep=time.sleep)

    def write_part(self: Store, step: int, *part: Any) -> None:
        if here and step >= first:
            late.set()
            over.wait()
            raise OSError(5, "the test is over")
        plain(self, step, *part)

    with patch.object(writer_module, "time", clock), patch.object(Store, "write_part", write_part):
        yield
        over.set()


@pytest.mark.parametrize(
    ("first", "overrides"),
    [
        (8, ["train.max_steps=100000"]),  # it trains on, with others due
        (8, ["train.max_steps=100000", "snapshot.asynchronous=false"]),
        (8, ["train.max_steps=100000", "train.eval_every=10"]),  # the best so far waits for it
        (24, []),  # the last one of the run
    ],
)
def test_a_write_that_never_returns_is_a_failed_snapshot(
    first: int, overrides: list[str], new_run: NewRun, outlived: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(*ASYNCHRONOUS, *overrides)
    with hook() as there, stuck(first):
        assert attempt(run.arguments(f"health.notify={there.url}"), Lifetime()) == CRASHED
    said = capsys.readouterr()
    assert re.findall(r"^SNAPSHOT FAILED \((\d) in a row\): .*: (?:.*) The run (.*)\.$", said.out, re.M) == [
        ("1", "ends here")
    ]
    assert "MINGPT_STORE_SECONDS" in said.err.splitlines()[-1]
    assert there.events() == ["snapshot lost"]
    assert run.store.steps() == [step for step in (20, 16, 12, 8, 4) if step < first]


@pytest.mark.slow
def test_a_process_whose_write_never_returns_ends(new_run: NewRun) -> None:
    """All the same, in a process of its own: neither Python's end nor torch's waits for that thread."""
    run = new_run(*ASYNCHRONOUS, "train.max_steps=100000", "world.timeout_seconds=2")
    program = f"""
import sys, threading
from mingpt.cli.cli import main
from mingpt.tiers import checkpointer
from mingpt.snapshot.store import Store
plain, checkpointer.SPARE_SECONDS = Store.write_part, 1
Store.write_part = lambda self, step, *part: threading.Event().wait() if step >= 8 else plain(self, step, *part)
sys.argv = ["mingpt", *{run.arguments()!r}]
main("train")
"""
    ended = start(
        [sys.executable, "-c", program],
        env=os.environ | {"MINGPT_STORE_SECONDS": "2"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (ended.returncode, run.store.steps()) == (CRASHED, [4]), ended.stdout[-2000:] + ended.stderr


def test_no_thread_is_started_while_a_run_trains(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outlived: None
) -> None:
    """Thread.start waits for ever where memory is so short that the new thread dies before it says that it runs."""
    plain, started, lifetime = threading.Thread.start, list[str](), Lifetime()

    def begin(thread: threading.Thread) -> None:
        if lifetime.phase is Phase.TRAINING and not lifetime.ending:
            started.append(thread.name)
        plain(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    (tmp_path / "memory").mkdir()
    tiers = ("snapshot.hot_every_steps=2", f"snapshot.hot_dir={tmp_path}/memory", "snapshot.verify_after_write=true")
    run = new_run("snapshot.asynchronous=true", *tiers)
    assert attempt(run.arguments(), lifetime) == FINISHED
    assert started == []
    assert verify(run.store, 24).step == 24


def hang_in_the_second(arguments: list[str]) -> None:
    """One of two processes, of which the second one's writes never return from step 8 on."""
    # The first one still waits for the second one's report.
    with stuck(8, here=Env.read().rank == 1), patch.object(checkpointer, "SPARE_SECONDS", 2):
        assert attempt(arguments, Lifetime()) == CRASHED


@pytest.mark.slow
def test_all_processes_end_when_the_write_of_one_never_returns(new_run: NewRun) -> None:
    run = new_run(*ASYNCHRONOUS, "train.max_steps=100000")
    said = in_forks(2, hang_in_the_second, run.arguments())
    assert said.count("SNAPSHOT FAILED (1 in a row): the snapshot of step 8 has been in flight for too long") == 1
    assert run.store.steps() == [4]
