"""The modern model and Muon keep the claim; and a run with a stable phase can be extended exactly."""

import os
import signal
from collections.abc import Callable

import pytest

from mingpt.commands import snapshots
from run_kit import Run

pytestmark = pytest.mark.slow

NewRun = Callable[..., Run]
MODERN = (
    "model=modern", "~model.dropout", "model.n_layer=1", "model.n_head=2", "model.n_kv_head=1", "model.n_embd=16",
    "optimizer=muon", "schedule=wsd",
)  # fmt: skip


@pytest.mark.parametrize("model", [MODERN, ("optimizer=muon",)], ids=["modern", "gpt2"])
def test_a_kill_and_other_worlds_change_no_bit(new_run: NewRun, undisturbed: NewRun, model: tuple[str, ...]) -> None:
    run = new_run(*model)
    started = run.start(3)
    started.on_step = lambda step: os.killpg(started.process.pid, signal.SIGKILL) if step == 11 else None
    assert started.wait() < 0
    run.finish(2)
    assert "resumed from step" in run.finish(1, "train.max_steps=28", "schedule.decay_steps=24")
    longer = undisturbed(*model, "train.max_steps=28", "schedule.decay_steps=24")
    assert run.digest() == longer.digest() != undisturbed(*model).digest()


def test_a_run_is_extended_exactly_from_its_stable_phase(new_run: NewRun, undisturbed: NewRun) -> None:
    """16 steps, of which 4 decay, then 24: the bits of a run that was planned for 24."""
    planned, end = (
        (*MODERN, "schedule.cooldown_steps=4", "snapshot.keep=1", "train.eval_every=0"),
        "snapshot.every_steps=0",
    )
    run = new_run(*planned, end)
    run.finish(2, "train.max_steps=16", "schedule.decay_steps=16")
    assert run.store.steps() == [16, 12]
    assert snapshots.main(["rewind", run.dir, "--step", "12"]) == 0
    output = run.finish(1)
    assert "from step 13 on, schedule.decay_steps: 16 -> 24: the bits are those of a run planned so before" in output
    assert "equality with an undisturbed run ends" not in output
    assert run.digest() == undisturbed(*planned, end).digest()


def test_a_changed_past_is_refused(new_run: NewRun) -> None:
    run = new_run("schedule=linear", "train.max_steps=8", "schedule.decay_steps=8")
    run.finish(1)
    started = run.start(1, "train.max_steps=12", "schedule.decay_steps=12")
    assert started.wait() == 64
    assert "schedule.decay_steps: 8 -> 12" in started.output


def test_prune_keeps_the_end_of_the_stable_phase(new_run: NewRun) -> None:
    run = new_run("schedule=wsd", "train.max_steps=10", "schedule.decay_steps=10", "snapshot.every_steps=2")
    run.finish(1)
    assert snapshots.main(["prune", run.dir, "--keep", "1", "--no-keep-best"]) == 0
    assert run.store.steps() == [10, 8]


@pytest.mark.parametrize("names", [("adamw", "muon"), ("muon", "adamw")])
def test_another_optimizer_begins_anew(new_run: NewRun, names: tuple[str, str]) -> None:
    run = new_run(*(o for o in MODERN if not o.startswith("optimizer")), "train.max_steps=4")
    run.finish(1, f"optimizer={names[0]}")
    output = run.finish(1, f"optimizer={names[1]}", "train.max_steps=6", "resume.changed=true")
    assert f"optimizer.name: {names[0]} -> {names[1]}" in output
    assert "what the other optimizer remembers of a parameter is not known to this one, and begins anew" in output
