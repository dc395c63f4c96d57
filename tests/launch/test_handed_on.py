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
from mingpt.world.platforms import require_launcher
from node_kit import Node
from run_kit import Run


def run_python(script: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", script, *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


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
    with pytest.raises(UserError, match=rf"^{key.partition('=')[0]}.*: \$\{{now:…\}} is another time in each process"):
        compose.refuse_the_time([key])


def test_the_launchers_moment_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MOMENT, "951826271.25")
    names = {config.run.name for _ in range(2) if (config := compose.configure(["run.name=r-${now:%Y-%f}"]))}
    assert names == {"r-2000-250000"}


def test_under_plain_torchrun_the_time_is_refused(new_run: Callable[..., Run]) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "mingpt.train", *training(new_run(), "run.name=r-${now:%f}")]
    done = subprocess.run(command, env={**os.environ, **world}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 64, done.stderr
    assert done.stderr.startswith("error: run.name: ${now:…} is another time in each process and at each restart")


def test_a_pod_of_several_does_not_train_alone() -> None:
    command = [sys.executable, "-m", "mingpt.train", "data=random"]
    env = {**os.environ, "PET_NNODES": "2"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 64
    assert done.stderr.startswith("error: PET_NNODES=2 in the environment announces several nodes, and this process ")


def test_a_process_of_several_without_a_rank_does_not_train_alone() -> None:
    require_launcher({"WORLD_SIZE": "1"})
    require_launcher({"WORLD_SIZE": "2", "RANK": "0"})
    with pytest.raises(UserError) as caught:
        require_launcher({"WORLD_SIZE": "2"})
    assert str(caught.value) == (
        "WORLD_SIZE=2 in the environment announces several processes, but RANK is not set, and this process would "
        "run alone: start it with `mingpt launch` or torchrun, or unset WORLD_SIZE"
    )


def test_options_that_are_none_show_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        compose.configure(["--data.path=https://user:S3CRET@host/x?sig=S3CRET"])
    assert ended.value.code == 64
    error = capsys.readouterr().err
    assert "data.path" in error
    assert "S3CRET" not in error


def test_a_broken_environment_is_a_mistake_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> entry.Program:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(Lifetime, "begin", lambda self: None)
    with pytest.raises(SystemExit) as ended:
        entry.run(load, Lifetime(), worker=False)
    assert ended.value.code == 64
    assert capsys.readouterr().err == (
        "error: this Python environment is broken: libcudart.so.12: cannot open shared object file: install the "
        "project again, as its README says\n"
    )


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
    done = run_python(LEAVING, *training(new_run()))
    assert done.returncode == 64, done.stderr
    assert "error: this process alone\n" in done.stderr


SPEAKING = """
import os, sys
import torch.distributed as dist
from mingpt.world.world import World
import torch
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 3)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
whole = World(rank, 3, rank, torch.device("cpu"), "gloo")
gathered = []
World.gather = lambda self, value: gathered.append(value)
assert whole.broadcast({"text": "x" * 100_000} if rank == 0 else None) == {"text": "x" * 100_000}
ranks = dist.new_group([1, 2], backend="gloo")
if rank:
    node = World(rank - 1, 2, rank, torch.device("cpu"), "gloo", ranks)
    assert node.broadcast(rank if node.is_main else None) == 1
assert gathered == []
dist.barrier()
os._exit(0)
"""


def test_one_answer_is_sent_once_and_not_gathered_from_all(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SPEAKING]
    three = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
             for rank in range(3)]  # fmt: skip
    ends = [(process.communicate(timeout=600)[1], process.returncode) for process in three]
    assert [code for _, code in ends] == [0, 0, 0], ends
