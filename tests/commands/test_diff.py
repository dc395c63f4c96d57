"""`mingpt diff`: a planted difference of each kind is named."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mingpt.report.parting import measured
from mingpt.train import loop
from mingpt.train.step import train_step
from tests.kits.branch_kit import train
from tests.kits.replay_kit import files_of
from tests.kits.rewriting_kit import rewrite
from tests.kits.run_kit import Run
from tests.kits.told import Told
from tests.kits.verb_kit import mingpt, store

pytestmark = pytest.mark.usefixtures("base")
WEIGHT = "transformer.h.1.mlp.c_fc.weight"


def unequal(found: dict[str, Any]) -> set[str]:
    """Which parts of the answer say that something differs."""
    parts = {part for part in ("config", "code", "numerics", "step", "snapshot") if found[part]}
    return parts | ({"data"} if found["data"][0] != found["data"][1] else set())


def turn(weight: torch.Tensor) -> None:
    weight.view(torch.int32)[3, 5] ^= 1 << 20


def test_a_key_of_the_optimizer_is_named(text: Path, cache: Path, tmp_path: Path) -> None:
    """The trace shows it in step 2, whose state it has changed."""
    train(Path("b"), text, cache, "optimizer.weight_decay=0.2", "train.log_every=2")
    before = files_of(tmp_path)
    found = mingpt.json("diff base b")
    assert files_of(tmp_path) == before
    assert unequal(found) == {"config", "step", "snapshot"}
    assert found["config"] == {"optimizer.weight_decay": [0.1, 0.2]}
    assert found["others"] == {"train.log_every": [1, 2]}
    assert (found["step"], found["equal"], found["snapshot"]) == (2, None, [4, 4])
    assert "  optimizer.weight_decay: 0.1 -> 0.2\n" in mingpt("diff base b --exit-code", code=1)


def test_a_byte_of_the_data_is_other_data(text: Path, cache: Path) -> None:
    (path := Path("other.txt")).write_text(text.read_text()[:2000] + text.read_text()[2000:].replace("king", "kong", 1))
    train(Path("b"), path, cache)
    assert {"data"} <= unequal(mingpt.json("diff base b")) <= {"data", "step", "snapshot"}


@pytest.mark.slow
def test_kernels_that_no_key_chose(text: Path, cache: Path) -> None:
    """The environment makes torch take the kernels of an older processor."""
    Run("b", text, cache, env={"ATEN_CPU_CAPABILITY": "default"}).finish(1, "train.max_steps=12", "run.name=run")
    assert "numerics" in unequal(mingpt.json("diff base b")) <= {"numerics", "step", "snapshot"}


def test_one_flipped_bit_of_a_weight_is_named() -> None:
    shutil.copytree("base", "b")
    rewrite(store("b"), 8, lambda state: turn(state["model"][WEIGHT]))
    found = mingpt.json("diff base b")
    assert unequal(found) == {"snapshot"}
    assert (found["equal"], found["snapshot"], found["tensors"]) == (4, [8, 8], [1, 112])
    tensor = found["tensor"]
    assert (tensor["name"], tensor["differ"], tensor["at"][0]) == (WEIGHT, 1, [3, 5])


def test_two_attempts_of_which_one_machine_was_sick(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempt 2 computes steps 9 to 12 again, with a bit that flips in step 10."""
    shutil.rmtree("base/snapshots/step-000000012")

    def sick(context: Any, step: int, *given: Any) -> Any:
        if step == 9:
            turn(dict(context.model.named_parameters())[WEIGHT].data)
        return train_step(context, step, *given)

    monkeypatch.setattr(loop, "train_step", sick)
    train(Path("base"), text, cache)
    found = mingpt.json("diff base --attempts 1 2")
    assert (unequal(found), found["step"]) == ({"step"}, 10)


def test_snapshots_of_two_steps_are_compared_only_where_both_are_named() -> None:
    shutil.copytree("base", "b")
    for step in (4, 8):
        shutil.rmtree(f"b/snapshots/step-{step:09d}")
    found = mingpt.json("diff base@8 b")
    assert (found["common"], found["snapshot"], found["differs"]) == (0, None, False)
    assert mingpt.json("diff base@8 b@12")["snapshot"] == [8, 12]


@pytest.mark.parametrize("arguments", ["base", "base base/nothing", "base --attempts 1 3"])
def test_mistakes(arguments: str, told: Told) -> None:
    told(mingpt.refused(f"diff {arguments}"))


def test_the_values_that_are_furthest_apart() -> None:
    a, b = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([1.0, -0.0, 3.5])
    found = measured("w", "", a, b)
    assert (found.differ, found.at) == (2, ([2], "3.0", "3.5"))
    found = measured("w", "", torch.tensor([1.0, torch.nan]).bfloat16(), torch.tensor([1.0078125, 1.0]).bfloat16())
    assert (found.differ, found.at) == (2, ([1], "nan", "1.0"))
