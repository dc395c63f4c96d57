"""`mingpt plan`: how much memory a run needs, and what makes it fit."""

import re
from typing import Any

import pytest

from mingpt.commands.plan import CURES
from mingpt.train.footprint import CONSTANT_GPU
from paths_kit import ROOT
from told import Told
from verb_kit import mingpt


def planned(words: str, fits: bool = True) -> Any:
    found = mingpt.json(f"plan {words}", code=0 if fits else 64)
    assert found["fits"] is fits
    return found


def test_gpt2_xl_fits_into_four_nodes_of_four_l4() -> None:
    xl = "model=gpt2-xl batch.micro_size=4 train.recompute=block train.loss_rows=256 --num-nodes"
    found = planned(f"{xl} 4 --gpus L4:4")
    assert found["processes"] == 16
    assert found["total"] == sum(found["steady"].values()) + max(found["phases"].values()) + CONSTANT_GPU
    assert found["total"] < 0.6 * 24e9
    [shown] = re.findall(r"(?<=\ntotal: )[\d,]+", (ROOT / "docs/memory.md").read_text())
    assert int(shown.replace(",", "")) == pytest.approx(found["total"], rel=0.01)  # by torch
    # Two buckets are under way; the largest has one matrix, but for the embedding's, which goes in flights.
    for what in ("gradients that are sent", "slices that are received"):
        assert found["parts"][what] == 2 * 4 * 1600 * 6400


@pytest.mark.slow
def test_what_does_not_fit_does_with_what_the_message_names() -> None:
    medium, cured = "--gpus t4:2 model=gpt2-medium", "train.recompute=block train.loss_rows=1024 batch.micro_size=8"
    planned(f"{medium} batch.micro_size=16", fits=False)
    assert all(cure.partition("=")[0] in CURES for cure in cured.split())
    planned(f"{medium} {cured}")


def test_what_it_costs() -> None:
    """6 operations a parameter and token, and attention's, at 0.4 of 121 TFLOP/s."""
    run = "model=gpt2 batch.global_size=8 batch.micro_size=4 train.max_steps=1000 precision=bf16"
    operations = 1000 * 8 * 1024 * (6 * 124439808 + 12 * 12 * 768 * 1024)
    hours = operations / (2 * 0.4 * 121e12) / 3600
    cost = f"{hours:.2f} hours at 40% of the peak (an estimate), a cost of {1.5 * hours:.2f}"
    assert f": {cost}" in mingpt(f"plan {run} --gpus L4:2 run.price_per_hour=1.5")


@pytest.mark.parametrize(
    "arguments",
    [
        "--gpus L4:none", "--num-nodes 0", "--processes 64 batch.global_size=16", "batch.micro_sise=2",
        "model._target_=own_kit.Linear data._target_=examples.classifier.rows",
    ],
)  # fmt: skip
def test_mistakes(arguments: str, told: Told) -> None:
    told(mingpt.refused(f"plan {arguments}"))
