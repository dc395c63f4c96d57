"""`mingpt plan`: how much memory a run needs, and what makes it fit."""

import json
from typing import Any

import pytest

from mingpt.commands.plan import CURES, plan_command
from mingpt.train.footprint import CONSTANT_CPU, CONSTANT_GPU
from told import Told

XL = ("model=gpt2-xl", "batch.micro_size=4", "train.recompute=block", "train.loss_rows=256")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = plan_command([*arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (64 if found["fits"] is False else 0)
    return found


def test_gpt2_xl_fits_into_four_nodes_of_four_l4(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *XL, "--gpus", "L4:4", "--num-nodes", "4")
    assert (found["fits"], found["processes"]) == (True, 16)
    assert found["total"] == sum(found["steady"].values()) + max(found["phases"].values()) + CONSTANT_GPU
    assert found["total"] < 0.6 * 24e9
    # between nodes, after the sums inside
    sent, received = "gradients that are sent", "slices that are received"
    assert found["parts"][sent] == found["parts"][received] == found["parameters"]
    one = planned(capsys, *XL, "--gpus", "L4:1", "--num-nodes", "16")
    assert one["parts"][sent] == one["parts"][received] == 4 * found["parameters"]
    assert one["total"] > found["total"]


def test_what_does_not_fit_does_with_what_the_message_names(capsys: pytest.CaptureFixture[str]) -> None:
    medium = ("model=gpt2-medium", "batch.micro_size=16", "--gpus", "t4:2")
    assert planned(capsys, *medium)["fits"] is False
    cured = ("train.recompute=block", "train.loss_rows=1024", "batch.micro_size=8")
    assert all(cure.partition("=")[0] in CURES for cure in cured)
    assert planned(capsys, *medium, *cured)["fits"] is True


def test_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """6 operations a parameter and token, and attention's, at 0.4 of 121 TFLOP/s."""
    run = ("model=gpt2", "batch.global_size=8", "batch.micro_size=4", "train.max_steps=1000", "precision=bf16")
    assert plan_command([*run, "--gpus", "L4:2", "run.price_per_hour=1.5"]) == 0
    operations = 1000 * 8 * 1024 * (6 * 124439808 + 12 * 12 * 768 * 1024)
    hours = operations / (2 * 0.4 * 121e12) / 3600
    cost = f"{hours:.2f} hours at 40% of the peak (an estimate), a cost of {1.5 * hours:.2f}"
    assert f"1,000 steps, 8,192,000 tokens: {cost}" in capsys.readouterr().out


def test_on_cpus_the_copies_for_snapshots_count(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "model=gpt-nano", "batch.micro_size=2", "--processes", "2")
    assert found["fits"] is None
    used = sum(sum(found[part].values()) for part in ("steady", "snapshots")) + max(found["phases"].values())
    assert found["total"] == int(1.1 * used) + CONSTANT_CPU


@pytest.mark.parametrize(
    "arguments",
    [
        "--gpus L4:none", "--num-nodes 0", "--processes 64 batch.global_size=16", "batch.micro_sise=2",
        "model._target_=own_kit.Linear data._target_=examples.classifier.rows",
    ],
)  # fmt: skip
def test_mistakes(arguments: str, capsys: pytest.CaptureFixture[str], told: Told) -> None:
    assert plan_command(arguments.split()) == 64
    told(capsys.readouterr().err)
