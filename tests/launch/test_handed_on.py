"""What the launcher hands on to its workers, and what a process says before it leaves its world."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fault_kit import at_step, finish, launch, training
from mingpt.config import compose
from mingpt.config.moment import MOMENT
from mingpt.errors import UserError
from mingpt.world import entry
from mingpt.world.lifetime import Lifetime
from node_kit import Node
from run_kit import Run


@pytest.mark.slow
def test_restarts_find_the_run_of_the_moment_and_no_command_line_shows_an_override(new_run: Callable[..., Run]) -> None:
    run = new_run()
    seen: list[str] = []

    def strike() -> None:
        seen.extend(node.processes()[pid] for pid in node.workers())
        os.kill(node.workers()[0], signal.SIGKILL)

    node = Node(launch(run, f"run.dir={run.dir}-${{now:%H%M%S%f}}", options=("--nproc-per-node=2",)))
    node.on_line = at_step(50, strike)
    output = finish(node, 0)
    assert len(re.findall(r"^resumed from step (?:40|60) ", output, re.M)) == 1
    assert len(list(Path(run.dir).parent.glob(f"{Path(run.dir).name}-*"))) == 1
    assert len(seen) == 2
    assert all(re.search(r" -u -m mingpt\.train $", line) for line in seen), seen


@pytest.mark.parametrize(
    "key", ["run.name=r-${now:%f}", "run.dir=/tmp/${now:%Y-%m-%d}", "data.cache_dir=/tmp/${now:%S}"]
)
def test_what_follows_the_clock_is_found_whatever_the_pattern(key: str) -> None:
    compose.refuse_the_time(["seed=3"])
    assert compose.configure([key])
    with pytest.raises(UserError, match=f"^{key.partition('=')[0]}.*now"):
        compose.refuse_the_time([key])


def test_the_launchers_moment_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MOMENT, "951826271.25")
    names = {config.run.name for _ in range(2) if (config := compose.configure(["run.name=r-${now:%Y-%f}"]))}
    assert names == {"r-2000-250000"}


def test_options_that_are_none_show_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compose.configure(["--data.path=https://user:S3CRET@host/x?sig=S3CRET"])
    assert ended.value.code == 64
    error = capsys.readouterr().err
    assert "data.path" in error
    assert "S3CRET" not in error


def test_a_broken_environment_is_a_mistake_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text('raise ImportError("libcudart.so.12: cannot open shared object file")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Lifetime, "begin", lambda self: None)
    with pytest.raises(SystemExit) as ended:
        entry.run("broken", "main", Lifetime(), worker=False)
    assert ended.value.code == 64
    assert "libcudart.so.12" in capsys.readouterr().err


LEAVING = """
import sys, threading, torch.distributed as dist
from mingpt.world import joining
from mingpt.train import attempt, session
from mingpt.errors import UserError
from mingpt.world.lifetime import Lifetime
joining.LEAVE_SECONDS = 1
dist.destroy_process_group = lambda: threading.Event().wait()  # as nccl's, while the others are in a collective
def train(*_): raise UserError("this process alone", everywhere=False)
session.train = train
sys.exit(attempt.attempt(sys.argv[1:], Lifetime()))
"""


def test_a_process_that_can_not_leave_its_world_has_told_why_and_keeps_its_code(new_run: Callable[..., Run]) -> None:
    command = [sys.executable, "-c", LEAVING, *training(new_run())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 64, done.stderr
    assert "error: this process alone\n" in done.stderr
