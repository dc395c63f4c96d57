"""`mingpt diff`: a planted difference of each kind is named, by what is stored and by what is executed again."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from branch_kit import train
from mingpt.report.parting import measured
from mingpt.snapshot.manifest import encode_manifest
from mingpt.snapshot.reader import read_manifest
from mingpt.train import loop
from mingpt.train.step import train_step
from replay_kit import files_of
from rewriting_kit import rewrite
from run_kit import Run
from told import Told
from verb_kit import mingpt, store

pytestmark = pytest.mark.usefixtures("base")
WEIGHT = "transformer.h.1.mlp.c_fc.weight"


@pytest.fixture
def diff(trained: Path, text: Path, cache: Path) -> Callable[[str], Any]:
    """The answer for programs; TRAINED is the run of which `base` is a copy. --replay knows where the data is."""

    def diff(words: str) -> Any:
        places = f"--a=data.path={text} --b=data.path={text} --a=data.cache_dir={cache} --b=data.cache_dir={cache}"
        return mingpt.json(f"diff {places if '--replay' in words else ''} {words.replace('TRAINED', str(trained))}")

    return diff


Diff = Callable[[str], Any]


@pytest.fixture
def other(text: Path, cache: Path) -> Callable[..., None]:
    """Trains `b` as the first run, but for these keys."""

    def other(*overrides: str, data: Path = text) -> None:
        train(Path("b"), data, cache, *overrides)

    return other


Other = Callable[..., None]


def unequal(found: dict[str, Any]) -> set[str]:
    """Which parts of the answer say that something differs."""
    parts = {part for part in ("config", "code", "numerics", "step", "snapshot") if found[part]}
    return parts | ({"data"} if found["data"][0] != found["data"][1] else set())


def first(found: dict[str, Any], at: int = 0) -> list[str | None]:
    """The name of what differs first in one of the steps that were executed, of each kind."""
    kinds = (found["replay"]["steps"][at][kind] for kind in ("samples", "outputs", "gradients", "state"))
    return [what and what["name"] for what in kinds]


def turn(weight: torch.Tensor) -> None:
    weight.view(torch.int32)[3, 5] ^= 1 << 20


def flip(step: int) -> None:
    rewrite(store("base"), step, lambda state: turn(state["model"][WEIGHT]))


def without(step: int) -> None:
    shutil.rmtree(f"base/snapshots/step-{step:09d}")


def test_a_key_of_the_optimizer_shows_in_an_update(trained: Path, other: Other, diff: Diff) -> None:
    """The trace shows it in step 2, whose state it has changed."""
    other("optimizer.weight_decay=0.2", "train.log_every=2")
    before = files_of(trained), files_of(Path("b"))
    found = diff("TRAINED b --replay")
    assert (files_of(trained), files_of(Path("b"))) == before
    assert unequal(found) == {"config", "step", "snapshot"}
    assert found["config"] == {"optimizer.weight_decay": [0.1, 0.2]}
    assert found["others"] == {"train.log_every": [1, 2]}
    assert (found["step"], found["equal"], found["snapshot"]) == (2, None, [4, 4])
    assert [step["step"] for step in found["replay"]["steps"]] == [1, 2]
    assert first(found) == [None] * 3 + ["transformer.h.0.attn.c_attn.weight"]
    assert first(found, 1)[1] == "transformer.wte"
    assert "  optimizer.weight_decay: 0.1 -> 0.2\n" in mingpt("diff base b --exit-code", code=1)


def test_a_byte_of_the_data_shows_in_a_sample(other: Other, text: Path, diff: Diff) -> None:
    (path := Path("other.txt")).write_text(text.read_text()[:2000] + text.read_text()[2000:].replace("king", "kong", 1))
    other(data=path)
    found = diff(f"TRAINED b --replay --b=data.path={path}")
    assert {"data"} <= unequal(found) <= {"data", "step", "snapshot"}
    samples = found["replay"]["steps"][0]["samples"]
    assert (samples["differ"], samples["of"]) == (1, 16)
    assert first(found)[1] == "transformer.wte"


@pytest.mark.slow
def test_kernels_that_no_key_chose(text: Path, cache: Path, diff: Diff) -> None:
    """The environment makes torch take the kernels of an older processor."""
    Run("b", text, cache, env={"ATEN_CPU_CAPABILITY": "default"}).finish(1, "train.max_steps=12", "run.name=run")
    found = diff("TRAINED b --replay")
    assert "numerics" in unequal(found) <= {"numerics", "step", "snapshot"}
    assert (found["replay"]["steps"], found["replay"]["same"]) == ([], [True, False])


def test_one_flipped_bit_of_a_weight_is_named(diff: Diff) -> None:
    flip(8)
    found = diff("TRAINED base --replay")
    assert unequal(found) == {"snapshot"}
    assert (found["equal"], found["snapshot"], found["tensors"]) == (4, [8, 8], [1, 112])
    tensor = found["tensor"]
    assert (tensor["name"], tensor["differ"], tensor["at"][0]) == (WEIGHT, 1, [3, 5])
    # The trace is as it was: the first snapshot that differs says which step to execute.
    replayed = found["replay"]
    assert (replayed["step"], replayed["before"]["name"], replayed["same"]) == (9, WEIGHT, [True, False])


def test_two_attempts_of_which_one_machine_was_sick(other: Other, diff: Diff, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempt 2 computes steps 9 to 12 again, with a bit that flips in step 10."""
    without(12)
    Path("base").rename("b")

    def sick(context: Any, step: int, *given: Any) -> Any:
        if step == 9:
            turn(dict(context.model.named_parameters())[WEIGHT].data)
        return train_step(context, step, *given)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_step", sick)
        other()
    replayed = diff("b --attempts 1 2 --replay")["replay"]
    assert (replayed["begin"], replayed["step"], replayed["steps"]) == ([8, 8], 10, [])
    assert replayed["same"] == [True, False]


def test_snapshots_of_two_steps_are_compared_only_where_both_are_named(diff: Diff) -> None:
    without(4)
    without(8)
    found = diff("TRAINED@8 base")
    assert (found["common"], found["snapshot"], found["differs"]) == (0, None, False)
    assert diff("TRAINED@8 base@12")["snapshot"] == [8, 12]


@pytest.mark.parametrize(
    "arguments",
    [
        "a", "a a/nothing", "a --attempts 1 3", "a b --replay", "a b --a=data.path=x", "a@4 b@8 --replay",
        "a old --replay --a=data.path={text} --b=data.path={text}",
    ],
)  # fmt: skip
def test_mistakes(arguments: str, trained: Path, text: Path, told: Told) -> None:
    """old: of a version whose numerics this one does not have."""
    shutil.copytree(trained, "a")
    flip(8)
    Path("base").rename("old" if "old" in arguments else "b")
    if "old" in arguments:
        for step in (4, 8, 12):
            manifest = read_manifest(store("old"), step)
            history = [h | {"numerics": h["numerics"] | {"mingpt": 999}} for h in manifest.history]
            path = Path(f"old/snapshots/step-{step:09d}/manifest.json")
            path.write_bytes(encode_manifest(manifest.model_copy(update={"history": history})))
    told(mingpt.refused("diff " + arguments.format(text=text)), text)


def test_the_values_that_are_furthest_apart() -> None:
    a, b = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([1.0, -0.0, 3.5])
    found = measured("w", "", a, b)
    assert (found.differ, found.at) == (2, ([2], "3.0", "3.5"))
    found = measured("w", "", torch.tensor([1.0, torch.nan]).bfloat16(), torch.tensor([1.0078125, 1.0]).bfloat16())
    assert (found.differ, found.at) == (2, ([1], "nan", "1.0"))
