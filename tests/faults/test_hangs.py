"""A run that hangs ends with 70 and says where; one that is slow, or was suspended, does not end."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from mingpt.observe.ledger import accounts
from tests.kits.fault_kit import LONG, at_step, finish, launch
from tests.kits.node_kit import Node
from tests.kits.own_kit import own_run
from tests.kits.paths_kit import KITS
from tests.kits.run_kit import NewRun

pytestmark = pytest.mark.slow

LIMIT = "health.hang_seconds=20"
HERE = f"rank 1 on {os.uname().nodename}"


def test_a_stopped_process_is_named_and_the_run_goes_on(new_run: NewRun, undisturbed: NewRun) -> None:
    run = new_run(LIMIT)
    node = Node(launch(run, "launch.shutdown_timeout_seconds=4"))
    node.on_line = at_step(50, lambda: os.kill(node.workers()[1], signal.SIGSTOP))
    output = finish(node, 0)
    [said] = re.findall(r"^error: the run hangs: (.*)$", output, re.M)
    assert re.match(rf"{HERE} does not answer .*#\d+", said), said
    ends = [account.end for account in accounts(run.dir)]
    assert ends == [f"failed: the run hangs: {said}", "finished"]
    assert run.digest() == undisturbed(*LONG).digest()


def test_a_hang_that_holds_the_interpreter_lock_ends_the_run_and_says_where(tmp_path: Path) -> None:
    summary = "does not answer .*; its last known collective is"
    limits = (LIMIT, "launch.max_attempts_without_progress=1", "launch.shutdown_timeout_seconds=2")
    run = own_run(tmp_path, "Linear", *limits, "snapshot.every_steps=0", "train.eval_every=0")
    run.code = (*run.code[:1], "data._target_=tests.kits.own_kit.hangs")
    command = [sys.executable, "-m", "mingpt.launch", "--nproc-per-node=2", *run.arguments()]
    output = finish(Node(command, run.env), 70)
    [said] = re.findall("^error: the run hangs: (.*)", output, re.M)
    assert re.match(f"{HERE} {summary}", said), output[-6000:]
    assert re.search(f"^launch: exit code 70: .*{HERE} {summary}", output, re.M)
    assert re.search(r"^rank 0 on \S+: no progress for 20 s .*; last entered all_\w+ #\d+; in ", output, re.M)
    assert str(KITS / "own_kit.py") in output
