"""A run that hangs ends with 70 and says where; one that is slow, or was suspended, does not end."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fault_kit import LONG, at_step, finish, launch
from hook_kit import hook
from mingpt.observe.ledger import accounts
from node_kit import Node
from own_kit import OwnRun, own_run
from paths_kit import KITS
from run_kit import Run

pytestmark = pytest.mark.slow

LIMIT = "health.hang_seconds=20"
HERE = f"rank 1 on {os.uname().nodename}"


def test_a_stopped_process_is_named_and_the_run_goes_on(
    new_run: Callable[..., Run], undisturbed: Callable[..., Run]
) -> None:
    run = new_run(LIMIT)
    node = Node(launch(run, "launch.shutdown_timeout_seconds=4"))
    node.on_line = at_step(50, lambda: os.kill(node.workers()[1], signal.SIGSTOP))
    output = finish(node, 0)
    [said] = re.findall(r"^error: the run hangs: (.*)$", output, re.M)
    assert re.match(rf"{HERE} does not answer .*#\d+", said), said
    ends = [account.end for account in accounts(run.dir)]
    assert ends == [f"failed: the run hangs: {said}", "finished"]
    assert run.digest() == undisturbed(*LONG).digest()


# In stacks that faulthandler itself writes: in pieces, between which others' lines may come; this is one piece.
STACK = re.escape(str(KITS / "own_kit.py"))
# what hangs rank 1 (own_kit.HANGS), in how many loader processes -> what the summary says, and a part of the stacks
HANGS = {
    "holds the lock": (0, "does not answer .*; its last known collective is", STACK),
    "leaves out": (0, r"has entered all_to_all as #\d+, where others have entered all_gather", "in finish"),
    "sleeps": (0, r"has not entered all_gather #\d+; it is in kits/own_kit.py:\d+", f'{STACK}", line \\d+ in'),
    "sleeps in its loader": (1, r"has not entered all_gather #\d+; it is in data/loader.py:\d+", STACK),
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=[pytest.mark.nightly] * (i > 0)) for i, how in enumerate(HANGS)]
)
def test_a_hang_ends_the_run_and_says_where(how: str, tmp_path: Path) -> None:
    workers, summary, stack = HANGS[how]
    run = OwnRun(str(tmp_path), Path(), Path(), (LIMIT, f"data.workers={workers}"))
    run.code = ("model._target_=own_kit.Linear", "data._target_=own_kit.hangs", f"data.how='{how.split(' in ')[0]}'")
    [_, *overrides] = run.command(1)[2:]
    limits = ("launch.max_attempts_without_progress=1", "launch.shutdown_timeout_seconds=2")
    few = ("train.max_steps=60", "snapshot.every_steps=0", "train.eval_every=0")
    command = [sys.executable, "-m", "mingpt.launch", "--nproc-per-node=2", *overrides, *few, *limits]
    output = finish(Node(command, {"PYTHONPATH": "tests/kits:."}), 70)
    [said] = re.findall("^error: the run hangs: (.*)", output, re.M)
    assert re.match(f"{HERE} {summary}", said), output[-6000:]
    assert re.search(f"^launch: exit code 70: .*{HERE} {summary}", output, re.M)
    assert re.search(r"^rank 0 on \S+: no progress for 20 s .*; last entered all_\w+ #\d+; in ", output, re.M)
    assert re.search(stack, output)


@pytest.mark.nightly
def test_the_first_process_that_answers_posts_the_alarm(new_run: Callable[..., Run]) -> None:
    with hook() as there:
        run = new_run("health.hang_seconds=10", f"health.notify='{there.url}'")
        once = ("launch.max_attempts_without_progress=1", "snapshot.every_steps=0")
        node = Node(launch(run, "launch.shutdown_timeout_seconds=1", *once))
        node.on_line = at_step(50, lambda: os.kill(node.workers()[0], signal.SIGSTOP))
        finish(node, 70)
        [told] = [body for body in there.bodies() if body["event"] == "hang"]
    assert f"rank 0 on {os.uname().nodename}" in told["text"]
    assert (told["attempt"], told["step"] >= 50) == (1, True)


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_observers_that_take_long_at_the_end_do_not_hang(fails: bool, tmp_path: Path) -> None:
    run = own_run(tmp_path / "run", "Linear", "health.hang_seconds=5")
    run.code = ("model._target_=own_kit.Linear", "data._target_=own_kit.ends_slowly", f"data.fails={fails}")
    started = run.start(1)
    assert started.wait() == (70 if fails else 0), started.output
    assert "no progress" not in started.output


@pytest.mark.nightly
def test_what_is_slow_does_not_hang(tmp_path: Path) -> None:
    """A first step, an evaluation in one process only, and a job that was suspended, each for longer than the limit."""
    run = own_run(tmp_path / "run", "Slow", "health.hang_seconds=6")
    started, stopped = run.start(2), list[float]()

    def suspend(step: int) -> None:
        if step >= 10 and not stopped:
            stopped.append(time.monotonic())
            workers = started.workers()
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in workers:
                    os.kill(pid, number)
                time.sleep(12 if number is signal.SIGSTOP else 0)

    started.on_step = suspend
    assert started.wait() == 0, started.output
    assert stopped
    # Stacks may be printed: a process that gets no CPU for 3 s is silent, until it is heard again.
    assert "the run hangs" not in started.output
