"""Models of one's own that are unlike a GPT: the same bits for any number of processes, or a clear refusal.

Weights whose memory lies in another order than their elements; parameters that a microbatch does not use; random
numbers in an evaluation; buffers that change.
"""

import shutil
from pathlib import Path

import pytest
import torch

from mingpt.observe.jsonl import read_metrics
from mingpt.snapshot.reader import read
from own_kit import own_run

pytestmark = pytest.mark.slow


def test_any_number_of_processes_and_a_resume_give_the_same_bits(tmp_path: Path) -> None:
    alone, two, three = (own_run(tmp_path / name, "Laid", "model.strided=true") for name in ("alone", "two", "three"))
    plain = own_run(tmp_path / "plain", "Laid")
    for run, world in ((alone, 1), (plain, 1), (two, 2)):
        run.finish(world)
    assert two.digest() == alone.digest()
    for resumed, world in ((three, 3), (two, 1)):
        shutil.copytree(alone.dir, resumed.dir, dirs_exist_ok=True)
        for step in resumed.store.steps():
            if step > 8:
                resumed.store.delete(step)
        assert "resumed from step 8" in resumed.finish(world)
        assert resumed.digest() == alone.digest()
    ours, theirs = (read(run.store, 24).state["model"] for run in (alone, plain))
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-5)


def test_a_parameter_that_a_microbatch_does_not_use_has_a_gradient_of_zeros(tmp_path: Path) -> None:
    alone, two, three = (own_run(tmp_path / name, "Rare") for name in ("alone", "two", "three"))
    right = own_run(tmp_path / "right", "Rare", "model.right=true")
    for run, world in ((alone, 1), (right, 1), (two, 2), (three, 3)):
        run.finish(world)
    assert two.digest() == three.digest() == alone.digest()
    ours, theirs = (read(run.store, 24).state["model"] for run in (alone, right))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_an_evaluation_draws_the_same_numbers_in_any_world(tmp_path: Path) -> None:
    runs = [own_run(tmp_path / str(world), "Noisy") for world in (1, 2, 3)]
    for world, run in enumerate(runs, 1):
        run.finish(world)
    assert len({run.digest() for run in runs}) == 1
    losses = [[row.get("val_loss") for row in read_metrics(run.dir) if "val_loss" in row] for run in runs]
    assert losses[0] == losses[1] == losses[2]
    assert len(set(losses[0])) == 3  # each step draws others


@pytest.mark.parametrize("world", [1, 2])
def test_a_buffer_that_begins_to_change_is_told_before_it_is_committed(tmp_path: Path, world: int) -> None:
    run = own_run(tmp_path, "LateBuffer", f"model.persistent={world == 1}")
    started = run.start(world)
    assert started.wait() == (64 if world == 1 else 1), started.output
    assert started.output.count("error: model._target_=own_kit.LateBuffer: forward has changed the buffers mean ") == 1
    # The 21st call comes in the 4th step, or in the 7th.
    assert run.store.steps() == ([] if world == 1 else [4])
