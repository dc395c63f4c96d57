"""What the agent decides when its workers have ended: of what other nodes wait for, and of signals that come late."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousHandler
from torch.distributed.launcher.api import LaunchConfig

from mingpt.errors import CRASHED, STOPPED
from mingpt.launch import agent
from mingpt.launch.ending import Ending
from mingpt.launch.newest import Newest, main, newest
from mingpt.launch.watchdog import RendezvousWatchdog
from mingpt.snapshot.elsewhere import Marker, remove_marker
from mingpt.snapshot.store import Store
from mingpt.world.lifetime import Lifetime
from tests.kits.config_kit import configured
from tests.kits.snapshot_kit import save


class Answers(RendezvousHandler):
    """Says how many nodes wait: these numbers, one for each question, the last of them for ever."""

    def __init__(self, *numbers: int) -> None:
        self.numbers, self.asked = list(numbers), 0

    def num_nodes_waiting(self) -> int:
        self.asked += 1
        if not self.numbers:
            raise RendezvousConnectionError("the store is gone")
        return self.numbers.pop(0) if len(self.numbers) > 1 else self.numbers[0]

    get_backend = next_rendezvous = is_closed = set_closed = get_run_id = shutdown = lambda self: None  # type: ignore[assignment, return-value]


def an_agent(answers: Answers, newest: Any = lambda: Newest(0), say: Any = print) -> agent.Agent:
    config = LaunchConfig(1, 1, 1)
    spec = WorkerSpec("worker", 1, answers, entrypoint=print, max_restarts=2)
    return agent.Agent(config, spec, 3, 30, newest, say, RendezvousWatchdog(0, 60, 60, print), Lifetime())


def stopped(answers: Answers, *requests: float) -> int:
    """The restarts that are left, of two, after workers that a request to stop has ended."""
    own = an_agent(answers)
    own.stop_requests.extend(requests)
    own._set_remaining_restarts(Ending([STOPPED], ["process 0: stopped on request after a snapshot"]))
    left: int = own._remaining_restarts
    return left


def test_a_node_that_waits_is_seen_although_torch_answers_from_what_it_read_a_second_ago() -> None:
    answers = Answers(0, 0, 1)
    assert stopped(answers) == 3  # this restart is not counted
    assert answers.asked == 3


def test_nobody_waits_so_the_run_was_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "WAITING_SECONDS", 0.3)
    answers = Answers(0)
    assert stopped(answers) == 0
    assert answers.asked > 1
    assert stopped(Answers()) == 0  # the store's host is gone


def test_an_agent_that_was_asked_itself_ends_at_once() -> None:
    answers = Answers(0)
    assert stopped(answers, 1.0) == 0
    assert answers.asked == 1


def test_the_end_of_the_store_is_no_error_once_the_workers_have_finished(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The head hosts the store, and may leave the exit barrier first."""
    records = list[str]()

    def note(record: logging.LogRecord) -> bool:
        records.append(record.msg)
        return True

    monkeypatch.setattr(logging.getLogger(api.__name__), "filters", [note])
    agent.leave_out_torchs_last_lines()
    head = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own: Any = an_agent(Answers(0))
    own._store = TCPStore("127.0.0.1", head.port, is_master=False)
    own._worker_group.group_world_size = 2
    del head
    own._exit_barrier()
    assert [message.startswith("Error") for message in records] == [True]
    assert caplog.text == ""


def crash(own: agent.Agent) -> int:
    """The restarts that are left after an attempt that has crashed; torch's loop then takes one."""
    own._set_remaining_restarts(Ending([CRASHED], ["process 0: killed"]))
    left: int = own._remaining_restarts
    own._remaining_restarts = max(0, left - 1)
    return left


def test_only_attempts_in_a_row_without_a_new_snapshot_are_counted() -> None:
    said, steps = list[str](), iter((0, 0, 5, 5, 9, 9, 9, 9))  # the first: as the agent starts
    own = an_agent(Answers(0), lambda: Newest(next(steps)), said.append)
    assert [crash(own) for _ in range(7)] == [2, 3, 2, 3, 2, 1, 0]
    assert ["2 of 3" in line for line in said] == [False] * 5 + [True]


@pytest.mark.parametrize("elsewhere", [True, False], ids=["a stale copy is here", "resume.anew=true"])
def test_the_steps_of_the_run_are_progress_though_this_node_had_higher_ones(elsewhere: bool, tmp_path: Path) -> None:
    """Of a copy from before a rewind, or of a lost run whose marker says so, as the agent finds it at its start."""
    config = configured(f"run.dir={tmp_path}/a", "snapshot.hot_every_steps=0", "resume.anew=true")
    store = Store(config.snapshot.dir)
    if elsewhere:
        save(store, 100)
    else:
        Marker("a" * 32, "a", 1, 100).write(config.run.dir)
    own = an_agent(Answers(0), partial(newest, config))
    remove_marker(config.run.dir)  # as the first attempt of a run does it that is here
    left = []
    for step in (5, 9, 12):
        if elsewhere:
            Marker("b" * 32, "b", 2, step).write(config.run.dir)
        else:
            save(store, step)
        left.append(crash(own))
    assert left == [3, 3, 3]


def test_there_and_back_without_a_new_step_is_no_progress() -> None:
    """This node has a copy of a run that another's disk has, too, and the two change places in each attempt."""
    here, there = Newest(100), Newest(50, "ada")
    places = iter([here, there, here, there, here, here])
    own = an_agent(Answers(0), lambda: next(places))
    assert [crash(own) for _ in range(5)] == [3, 2, 1, 0, 0]  # the other's disk counts once


def test_a_job_of_slurms_is_told_the_newest_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m mingpt.launch.newest`, before and after it trains."""
    assert main(["--nproc-per-node=2", f"run.dir={tmp_path}/run"]) == 0
    assert capsys.readouterr().out == "0\n"
    (tmp_path / "run").mkdir()
    Marker("a" * 32, "another-node", 1, 40).write(f"{tmp_path}/run")
    assert main([f"run.dir={tmp_path}/run"]) == 0
    assert capsys.readouterr().out == "40\n"
