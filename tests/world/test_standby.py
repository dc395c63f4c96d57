"""The warm standby: what it forks is a child like any other, and what it can't fork starts cold.

In place of the trainer, a program that says what it is, and ends as its environment says.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mingpt.world import standby
from mingpt.world.env import AGENT_PID
from mingpt.world.lifetime import STOP_SIGNALS
from tests.kits.node_kit import wait_until

PROGRAM = """
import json, os, signal, sys, threading, time
from mingpt.world import standby
if standby.PIPE in os.environ:
    standby.serve(IMPORTS)
json.dump(
    {
        "argv": sys.argv, "main": sys.modules["__main__"].__dict__ is globals(), "environment": dict(os.environ),
        "blocked": [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))], "cwd": os.getcwd(),
        "files": len(os.listdir("/proc/self/fd")), "group": os.getpgid(0) - os.getpid(),
        "parent": os.getppid(), "session": os.getsid(0) - os.getpid(), "threads": threading.active_count(),
    },
    open(os.environ["SAYS"] + ".part", "w"),
)
os.rename(os.environ["SAYS"] + ".part", os.environ["SAYS"])
if os.environ["CODE"] == "sleep":
    time.sleep(600)
os._exit(int(os.environ["CODE"]))
"""
Begin = Callable[..., standby.Standby]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """imports: what the standby does before it forks."""
    made = []

    def begun(imports: str = "lambda: None", seconds: float = 3e6) -> standby.Standby:
        monkeypatch.setenv(AGENT_PID, str(os.getpid()))
        command = (sys.executable, "-u", "-c", PROGRAM.replace("IMPORTS", imports))
        monkeypatch.setattr(standby, "COMMAND", command)
        made.append(standby.Standby(seconds))
        return made[-1]

    yield begun
    for one in made:
        one.close()


def environment(says: Path, code: object) -> dict[str, str]:
    return {**os.environ, "RANK": "3", "SAYS": str(says), "CODE": str(code), "UMLAUT": "\udcfc"}


def what_it_says(path: Path) -> Any:
    wait_until(path.exists, "the program has come so far")
    return json.loads(path.read_text())


def cold(env: dict[str, str]) -> "subprocess.Popen[bytes]":
    """As torch's agent starts a worker, with the mask of ours."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return subprocess.Popen(standby.COMMAND, env=env, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def forked(one: standby.Standby, env: dict[str, str]) -> standby.Worker:
    worker = one.fork(env)
    assert worker
    return worker


def ended(worker: standby.Worker) -> int | None:
    worker.wait(60)
    return worker.poll()


def test_a_fork_is_what_a_cold_start_makes(begin: Begin, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one = begin()
    for number in STOP_SIGNALS:  # to all processes of a job
        os.kill(one.process.pid, number)
    for code in (0, 70):
        says, env = tmp_path / str(code), environment(tmp_path / str(code), code)
        worker = forked(one, env)
        assert ended(worker) == code
        warm = what_it_says(says)
        says.unlink()
        assert cold(env).wait(60) == code
        assert warm == what_it_says(says)
        assert warm["environment"] == env
        assert warm["parent"] == os.getpid()
        assert warm["session"] == warm["group"] == 0
        assert {*map(signal.Signals, warm["blocked"])} >= {*STOP_SIGNALS}
    adopts = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(37, ctypes.byref(adopts), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    assert adopts.value == 0  # no orphan but a worker
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("imports", "seconds", "why"),
    [
        (
            "threading.Thread(target=time.sleep, args=[600], daemon=True).start",
            3e6,
            "it has 2 threads, so a fork is not safe",
        ),
        ("sys.exit", 3e6, "it has ended"),
        ("lambda: time.sleep(600)", 0.1, "no answer from it"),
    ],
)
def test_where_it_can_not_fork_workers_start_cold(
    imports: str, seconds: float, why: str, begin: Begin, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    one = begin(imports, seconds)
    for _ in range(2):
        assert one.fork(environment(tmp_path / "says", 0) | {"LARGE": "x" * 2**20}) is None
    assert capsys.readouterr().out == f"launch: workers start without the warm standby: {why}\n"
    assert one.process.returncode is not None
    assert not (tmp_path / "says").exists()


def test_workers_outlive_their_standby(begin: Begin, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one = begin()
    worker = forked(one, environment(tmp_path / "says", "sleep"))
    what_it_says(tmp_path / "says")
    assert Path(f"/proc/{worker.pid}/comm").read_text() == "rank 3\n"
    os.kill(one.process.pid, signal.SIGKILL)
    one.process.wait()
    assert worker.poll() is None
    assert one.fork(environment(tmp_path / "says", 0)) is None
    assert capsys.readouterr().out == "launch: workers start without the warm standby: it has ended\n"
    os.kill(worker.pid, signal.SIGTERM)  # blocked: the trainer unblocks it once it handles it
    assert worker.poll() is None
    os.kill(worker.pid, signal.SIGKILL)
    assert ended(worker) == -signal.SIGKILL
