"""The claim: kill it, move it, resize it: the same weights, bit for bit. Real kills, stops and damages of real runs.

test_worlds.py has it for every kind of model, number and data.
"""

import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mingpt.train.attempt import attempt
from mingpt.world.lifetime import Lifetime
from node_kit import ask_to_stop
from own_kit import own_run
from run_kit import Run

NewRun = Callable[..., Run]
slow = pytest.mark.slow


@slow
@pytest.mark.example
def test_sigkill_of_a_random_worker_at_random_steps_changes_nothing(new_run: NewRun, undisturbed: NewRun) -> None:
    chooser = random.Random(1)
    kills = sorted(chooser.sample(range(5, 24), 3))
    run = new_run()
    started = run.start(2, restarts=10)

    def kill(step: int) -> None:
        if kills and step >= kills[0] and started.attempt == 4 - len(kills):
            kills.pop(0)
            os.kill(chooser.choice(started.workers()), signal.SIGKILL)

    started.on_step = kill
    assert started.wait() == 0, started.output
    assert not kills, "not all kills took place"
    assert "attempt 4: steps" in started.output  # from step 1 if the kill came before a snapshot was durable
    assert run.digest() == undisturbed().digest()


@slow
@pytest.mark.example
def test_a_stopped_run_goes_on_with_another_number_of_processes(new_run: NewRun, undisturbed: NewRun) -> None:
    # The only snapshots are those at the stop and at the end; an evaluation at step 8 would leave one, too.
    run = new_run("snapshot.every_steps=0", "snapshot.keep_best=false")
    started = run.start(2)

    def stop(step: int) -> None:
        if step == 7:
            ask_to_stop(started.process.pid, workers=started.workers())

    started.on_step = stop
    assert started.wait() == 1, started.output  # torchrun turns its workers' 75 into 1
    (stopped_at,) = run.store.steps()
    assert 7 <= stopped_at < 24
    assert f"resumed from step {stopped_at} of " in run.finish(3)
    assert run.digest() == undisturbed().digest()


@slow
def test_a_damaged_newest_snapshot_is_set_aside_and_the_next_older_one_taken(
    new_run: NewRun, undisturbed: NewRun
) -> None:
    """tests/snapshot/test_snapshot_damage.py has all damages."""
    run = new_run()
    shutil.copytree(undisturbed().dir, run.dir)
    newest = Path(run.dir, "snapshots", "step-000000024")
    files = set(newest.iterdir())
    (part,) = newest.glob("model-00001-*")
    content = bytearray(part.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    part.write_bytes(content)
    output = run.finish(2)
    assert "DAMAGED SNAPSHOT of step 24" in output
    assert "resumed from step 20 of " in output
    assert run.digest() == undisturbed().digest()
    aside = set(newest.iterdir()) - files
    assert [p.name[:10] for p in aside] == ["set-aside-"]


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_begins_to_change_is_told_before_it_is_committed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], persistent: bool
) -> None:
    run = own_run(tmp_path, "LateBuffer", f"model.persistent={persistent}")
    assert attempt(run.arguments(), Lifetime()) == 64
    assert capsys.readouterr().err.count("error: model._target_=own_kit.LateBuffer") == 1
    assert run.store.steps() == []  # it changes in the fourth step, which has the first snapshot
