"""The claim: kill it, move it, resize it: the same weights, bit for bit. Real kills, stops and damages of real runs.

test_worlds.py has it for every kind of model, number and data.
"""

import os
import random
import signal
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest

from mingpt.compute.exchange import WeightGather
from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from tests.kits.node_kit import ask_to_stop
from tests.kits.own_kit import own_run
from tests.kits.run_kit import NewRun, in_forks

slow = pytest.mark.slow


@slow
@pytest.mark.example
def test_sigkills_a_stop_and_another_number_of_processes_change_nothing(new_run: NewRun, undisturbed: NewRun) -> None:
    chooser = random.Random(1)
    kills, stopped = sorted(chooser.sample(range(5, 15), 2)), list[int]()
    run = new_run()
    started = run.start(2, restarts=10)

    def strike(step: int) -> None:
        if kills and step >= kills[0] and started.output.count(": steps ") == 3 - len(kills):
            kills.pop(0)
            os.kill(chooser.choice(started.workers()), signal.SIGKILL)
        elif not kills and not stopped and step >= 17 and "attempt 3: steps" in started.output:
            stopped.append(step)
            ask_to_stop(started.process.pid, workers=started.workers())

    started.on_step = strike
    assert started.wait() == 1, started.output  # torchrun turns its workers' 75 into 1
    assert not kills, "not all kills took place"
    assert stopped[0] <= run.store.steps()[0] < 24
    assert f"resumed from step {run.store.steps()[0]} of " in run.finish(3)
    assert run.digest() == undisturbed().digest()


def dies(arguments: list[str]) -> None:
    """Trains, but process 1 is killed in its seventh step: the others have sent it gradients, and wait for weights."""
    finish, steps = WeightGather.finish, count(1)

    def killed(gather: WeightGather) -> None:
        if gather.world.rank == 1 and next(steps) == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        finish(gather)

    with patch.object(WeightGather, "finish", killed):
        assert attempt(arguments, Lifetime()) == 0


@slow
@pytest.mark.parametrize("own", ["", "Adafactor"])  # by slice, and by owner
def test_a_process_that_dies_between_update_and_gather_leaves_no_trace(
    new_run: NewRun, undisturbed: NewRun, own: str
) -> None:
    """The others then have weights of which a slice is old. None of that reaches a snapshot."""
    settings = (f"optimizer._target_=examples.own_optimizer.{own}", "optimizer.lr=0.001") if own else ()
    run = new_run(*settings)
    with pytest.raises(AssertionError, match=r"exit codes \[.*, -9, "):
        in_forks(3, dies, run.arguments("world.timeout_seconds=60"))  # gloo may miss it: docs/faults.md
    assert "resumed from step 4" in run.finish(3)
    assert run.digest() == undisturbed(*settings).digest()


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_begins_to_change_is_told_before_it_is_committed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], persistent: bool
) -> None:
    run = own_run(tmp_path, "LateBuffer", f"model.persistent={persistent}")
    assert attempt(run.arguments(), Lifetime()) == 64
    assert capsys.readouterr().err.count("error: model._target_=tests.kits.own_kit.LateBuffer") == 1
    assert run.store.steps() == []  # it changes in the fourth step, which has the first snapshot
