"""`mingpt plan`: how much memory a run needs, and what makes it fit."""

import json
from typing import Any

import pytest

from mingpt.commands.plan import plan_command
from mingpt.observe.speed import GPUS

XL = ("model=gpt2-xl", "batch.micro_size=4", "train.recompute=block", "train.loss_rows=256")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = plan_command([*arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (64 if found["fits"] is False else 0)
    return found


def test_gpt2_xl_fits_into_four_nodes_of_four_l4(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *XL, "--gpus", "L4:4", "--num-nodes", "4")
    assert (found["fits"], found["advice"], found["processes"], found["of"]) == (True, None, 16, 24 * 10**9)
    assert found["total"] == sum(found["steady"].values()) + max(found["phases"].values()) + found["constant"]
    assert found["total"] < 0.6 * found["of"]
    assert found["gradients"] == 4 * found["parameters"]
    assert found["sent"] == found["received"] == found["gradients"] // 4  # between nodes, after the sums inside
    one = planned(capsys, *XL, "--gpus", "L4:1", "--num-nodes", "16")
    assert one["sent"] == one["received"] == one["gradients"]
    assert one["total"] > found["total"]


def test_what_does_not_fit_is_told_with_what_helps(capsys: pytest.CaptureFixture[str]) -> None:
    """And the advice is followed."""
    medium = ("model=gpt2-medium", "batch.micro_size=16")
    found = planned(capsys, *medium, "--gpus", "t4:2")
    assert found["fits"] is False
    advice = [f"{key}={value}" for key, value in found["advice"].items()]
    assert "train.recompute=block" in advice
    assert planned(capsys, *medium, *advice, "--gpus", "t4:2")["fits"] is True


def test_what_fits_nowhere_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command([*XL, "model.n_embd=4800", "batch.micro_size=1", "batch.global_size=1", "--gpus", "T4"]) == 64
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "does not fit into a T4 of 16 GB (with 5% free): no setting that was tried makes it fit"


def test_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """6 operations a parameter and token, and attention's, at 0.4 of 121 TFLOP/s."""
    run = ("model=gpt2", "batch.global_size=8", "batch.micro_size=4", "train.max_steps=1000", "precision=bf16")
    assert plan_command([*run, "--gpus", "L4:2", "run.price_per_hour=1.5"]) == 0
    operations = 1000 * 8 * 1024 * (6 * 124439808 + 12 * 12 * 768 * 1024)
    hours = operations / (2 * 0.4 * 121e12) / 3600
    cost = f"{hours:.2f} hours at 40% of the peak (an estimate), a cost of {1.5 * hours:.2f}"
    assert f"1,000 steps, 8,192,000 tokens: {cost}" in capsys.readouterr().out


def test_on_cpus_the_copies_for_snapshots_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(["model=gpt-nano", "batch.micro_size=2", "--processes", "2"]) == 0
    said = capsys.readouterr().out
    assert "parameters on 1 x 2 processes on CPUs; 16 microbatches of 2 x" in said
    assert "CUDA" not in said
    found = planned(capsys, "model=gpt-nano", "batch.micro_size=2", "--processes", "2")
    assert found["fits"] is None
    used = sum(sum(found[part].values()) for part in ("steady", "snapshots")) + max(found["phases"].values())
    assert (found["gaps"], found["total"]) == (int(0.1 * used), used + found["gaps"] + found["constant"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--gpus", "H900:8"], f"--gpus H900:8: the memory of this GPU is not known here; there are {', '.join(GPUS)}"),
        (["--gpus", "L4:none"], "--gpus L4:none: give NAME:NUMBER, such as L4:1"),
        (["--num-nodes", "0"], "--num-nodes and --processes: give numbers from 1"),
        (["model._target_=own_kit.Linear", "data._target_=examples.classifier.rows"], "model._target_: only this"),
        (["--processes", "64", "batch.global_size=16"], "start at most 1 processes"),
        (["batch.micro_sise=2"], "did you mean"),
    ],
)
def test_mistakes_are_told(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command(arguments) == 64
    assert told in capsys.readouterr().err
