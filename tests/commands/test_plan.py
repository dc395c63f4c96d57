"""`mingpt plan`: how much memory a run needs, and what makes it fit."""

import re
from typing import Any

import pytest

from mingpt.commands.footprint import CONSTANT_GPU
from mingpt.commands.plan import CURES
from mingpt.observe.ledger import duration
from tests.kits.paths_kit import ROOT
from tests.kits.told import Told
from tests.kits.verb_kit import mingpt


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
    [shown] = re.findall(r"(?<=\ntotal: )[\d.]+(?= GB\n)", (ROOT / "docs/memory.md").read_text())
    assert float(shown) * 1e9 == pytest.approx(found["total"], rel=0.01)  # by torch
    # Two buckets are under way; the largest has one matrix, but for the embedding's, which goes in flights.
    for what in ("gradients that are sent", "slices that are received"):
        assert found["parts"][what] == 2 * 4 * 1600 * 6400


@pytest.mark.slow
def test_what_does_not_fit_does_with_what_the_message_names() -> None:
    medium, cured = "--gpus t4:2 model=gpt2-medium", "train.recompute=block train.loss_rows=1024 batch.micro_size=8"
    planned(f"{medium} batch.micro_size=16", fits=False)
    assert all(cure.partition("=")[0] in " ".join(CURES) for cure in cured.split())
    planned(f"{medium} {cured}")


def test_the_largest_microbatch_that_fits_can_be_pasted() -> None:
    run = "model=gpt2 model.n_layer=1 batch.global_size=96 --gpus T4:1"
    text = mingpt(f"plan {run} batch.micro_size=2")
    largest = int(text.splitlines()[-1].partition("the largest that fits: batch.micro_size=")[2])
    above = min(size for size in range(largest + 1, 97) if 96 % size == 0)
    assert 2 < largest < 96
    assert planned(f"{run} batch.micro_size={largest}")["largest_micro_size"] == largest
    assert planned(f"{run} batch.micro_size={above}", fits=False)["largest_micro_size"] == largest
    # Each process has a microbatch, and a batch that doubles begins with a part of one.
    assert planned(f"{run} batch.micro_size=2 --num-nodes 48")["largest_micro_size"] == 2
    assert planned(f"{run} batch.micro_size=8 batch.double_at=[1,2,3]")["largest_micro_size"] % 8 == 0
    wide = "model=gpt2-xl model.n_embd=4800 batch.global_size=1 batch.micro_size=1 --gpus T4:1"
    assert planned(wide, fits=False)["largest_micro_size"] is None


EAGER, REPLAY = 12 * 4.4e-3 + 148 * 43e-6, 0.3e-3


@pytest.mark.parametrize(
    ("gpus", "how", "step", "peak"),
    [
        # The GPUs take longer.
        ("L4:2", "batch.micro_size=4 train.cuda_graphs=false", EAGER, 2 * 121e12),
        ("L4:1 --processes 2 world.backend=gloo", "batch.micro_size=4 train.cuda_graphs=false", EAGER, 121e12),
        ("H200:1", "batch.micro_size=1", 8 * REPLAY, 989e12),
        # Their hosts do. Of several processes the last microbatch, which sends, is no replay.
        ("H200:2", "batch.micro_size=1 train.cuda_graphs=false", 4 * EAGER, 2 * 989e12),
        ("H200:2", "batch.micro_size=1 reduce=fast", 4 * EAGER, 2 * 989e12),  # which no graph can be
        ("H200:2", "batch.micro_size=1", 3 * REPLAY + EAGER, 2 * 989e12),
        ("H200:8", "batch.micro_size=1 train.compile=true", 12 * 3.8e-3 + 148 * 43e-6, 8 * 989e12),
    ],
)
def test_what_it_costs(gpus: str, how: str, step: float, peak: float) -> None:
    """6 operations a parameter and token, and attention's, at 0.4 of the peak; and what a host launches in a step."""
    run = f"plan model=gpt2 batch.global_size=8 train.max_steps=100000 precision=bf16 run.price_per_hour=1.5 {how}"
    computing = 100_000 * 8 * 1024 * (6 * 124_475_904 + 12 * 12 * 768 * 1024) / (0.4 * peak)
    launching = 100_000 * step
    seconds = max(computing, launching)
    cost = (
        f"{duration(seconds)} of computing, without the network (estimates: the GPUs {duration(computing)} at 40% of "
        f"the peak, their hosts {duration(launching)}), a cost of {1.5 * seconds / 3600:,.2f}\nfits into"
    )
    assert f"100,000 steps, 819,200,000 tokens: {cost}" in mingpt(f"{run} --gpus {gpus}")


def test_gpus_that_are_shared_must_have_room_for_all_their_processes() -> None:
    shape = "model=gpt2 batch.micro_size=4 world.backend=gloo --gpus T4:1 --processes"
    assert planned(f"{shape} 1")["total"] < 0.95 * 16e9 < 2 * planned(f"{shape} 2", fits=False)["total"]


def test_without_gpus_it_is_a_plan_for_cpus() -> None:
    run = "plan model=gpt2 batch.micro_size=4 --processes 2"
    assert (text := mingpt(f"{run} --gpus none")) == mingpt(run)
    assert text.endswith(" GB\n")
    assert "computing" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        "--gpus L4:none", "--gpus L4:2 --processes 3", "--num-nodes 0", "--processes 64 batch.global_size=16",
        "batch.micro_sise=2", "model._target_=tests.kits.own_kit.Linear data._target_=examples.classifier.rows",
    ],
)  # fmt: skip
def test_mistakes(arguments: str, told: Told) -> None:
    told(mingpt.refused(f"plan {arguments}"))
