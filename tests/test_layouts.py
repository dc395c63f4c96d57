"""Weights whose memory lies in another order than their elements (channels_last, transposed): the same bits, too."""

import shutil
from pathlib import Path

import pytest
import torch

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
