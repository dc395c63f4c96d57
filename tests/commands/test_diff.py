"""`mingpt diff`: a planted difference of each kind is named, by what is stored and by what is executed again."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mingpt.train.loop
from branch_kit import train
from mingpt.commands.diff import diff_command
from mingpt.errors import USER_ERROR
from mingpt.report.parting import measured
from mingpt.snapshot.manifest import encode_manifest
from mingpt.snapshot.reader import read_manifest
from mingpt.snapshot.store import Store
from mingpt.train.step import train_step
from replay_kit import files_of
from rewriting_kit import rewrite
from run_kit import Run
from told import Told

Captured = pytest.CaptureFixture[str]
Diff = Callable[..., Any]
WEIGHT = "transformer.h.1.mlp.c_fc.weight"


@pytest.fixture
def diff(text: Path, cache: Path, capsys: Captured) -> Diff:
    """The answer for programs. --replay knows where the data is."""

    def diff(*arguments: object) -> Any:
        places = [f"--{side}={key}" for side in "ab" for key in (f"data.path={text}", f"data.cache_dir={cache}")]
        capsys.readouterr()
        code = diff_command([*(places if "--replay" in arguments else ()), *map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        assert code == 0, err
        return json.loads(out)

    return diff


@pytest.fixture
def other(tmp_path: Path, text: Path, cache: Path) -> Callable[..., Path]:
    """Trains as the first run, but for these keys."""

    def other(*overrides: str, data: Path = text) -> Path:
        train(tmp_path / "b", data, cache, *overrides)
        return tmp_path / "b"

    return other


@pytest.fixture
def changed(trained: Path, tmp_path: Path) -> Path:
    """A copy, to be changed."""
    return shutil.copytree(trained, tmp_path / "b")


def unequal(found: dict[str, Any]) -> set[str]:
    """Which parts of the answer say that something differs."""
    parts = {part for part in ("config", "code", "numerics", "step", "snapshot") if found[part]}
    return parts | ({"data"} if found["data"][0] != found["data"][1] else set())


def first(found: dict[str, Any], at: int = 0) -> dict[str, str | None]:
    """The name of what differs first in one of the steps that were executed, of each kind."""
    kinds = {kind: found["replay"]["steps"][at][kind] for kind in ("samples", "outputs", "gradients", "state")}
    return {kind: what and what["name"] for kind, what in kinds.items()}


def flip(run: Path, step: int) -> None:
    def change(state: dict[Any, dict[str, torch.Tensor]]) -> None:
        state["model"][WEIGHT].view(torch.int32)[3, 5] ^= 1 << 20

    rewrite(Store(f"{run}/snapshots"), step, change)


def test_a_key_of_the_model_shows_in_an_output(trained: Path, other: Callable[..., Path], diff: Diff) -> None:
    b = other("model.dropout=0.2")
    before = files_of(trained), files_of(b)
    replayed = (found := diff(trained, b, "--replay"))["replay"]
    assert (files_of(trained), files_of(b)) == before
    assert [s["step"] for s in replayed["steps"]] == [1]
    assert (replayed["step"], replayed["begin"], replayed["before"]) == (1, [0, 0], None)
    assert (first(found)["samples"], first(found)["outputs"]) == (None, "transformer.h.0.ln_1")
    assert replayed["steps"][0]["around"]  # the dropout of the embeddings is no module
    assert replayed["same"] == [True, True]


def test_a_key_of_the_optimizer_shows_in_an_update(
    trained: Path, other: Callable[..., Path], diff: Diff, capsys: Captured
) -> None:
    """The trace shows it in step 2, whose state it has changed."""
    b = other("optimizer.weight_decay=0.2", "train.log_every=2")
    found = diff(trained, b, "--replay")
    assert unequal(found) == {"config", "step", "snapshot"}
    assert found["config"] == {"optimizer.weight_decay": [0.1, 0.2]}
    assert found["others"] == {"train.log_every": [1, 2]}
    assert (found["step"], found["equal"], found["snapshot"]) == (2, None, [4, 4])
    assert [step["step"] for step in found["replay"]["steps"]] == [1, 2]
    assert [*first(found).values()] == [None] * 3 + ["transformer.h.0.attn.c_attn.weight"]
    assert first(found, 1)["outputs"] == "transformer.wte"
    assert diff_command([str(trained), str(b), "--exit-code"]) == 1
    assert "  optimizer.weight_decay: 0.1 -> 0.2\n" in capsys.readouterr().out


def test_a_byte_of_the_data_shows_in_a_sample(
    trained: Path, other: Callable[..., Path], tmp_path: Path, text: Path, diff: Diff
) -> None:
    path = tmp_path / "other.txt"
    path.write_text(text.read_text()[:2000] + text.read_text()[2000:].replace("king", "kong", 1))
    found = diff(trained, other(data=path), "--replay", f"--b=data.path={path}")
    assert {"data"} <= unequal(found) <= {"data", "step", "snapshot"}
    samples = found["replay"]["steps"][0]["samples"]
    assert (samples["differ"], samples["of"]) == (1, 16)
    assert first(found)["outputs"] == "transformer.wte"


@pytest.mark.slow
def test_kernels_that_no_key_chose(trained: Path, tmp_path: Path, text: Path, cache: Path, diff: Diff) -> None:
    """The environment makes torch take the kernels of an older processor."""
    b = Run(f"{tmp_path}/b", text, cache, env={"ATEN_CPU_CAPABILITY": "default"})
    b.finish(1, "train.max_steps=12", "run.name=run")
    found = diff(trained, b.dir, "--replay")
    assert "numerics" in unequal(found) <= {"numerics", "step", "snapshot"}
    assert (found["replay"]["steps"], found["replay"]["same"]) == ([], [True, False])


def test_one_flipped_bit_of_a_weight_is_named(trained: Path, changed: Path, diff: Diff) -> None:
    flip(changed, 8)
    found = diff(trained, changed, "--replay")
    assert unequal(found) == {"snapshot"}
    assert (found["equal"], found["snapshot"], found["tensors"]) == (4, [8, 8], [1, 112])
    tensor = found["tensor"]
    assert (tensor["name"], tensor["differ"], tensor["largest"], tensor["at"][0]) == (WEIGHT, 1, 1 << 20, [3, 5])
    # The trace is as it was: the first snapshot that differs says which step to execute.
    replayed = found["replay"]
    assert (replayed["step"], replayed["before"]["name"], replayed["same"]) == (9, WEIGHT, [True, False])
    flip(changed, 8)
    flip(changed, 12)
    replayed = diff(trained, changed, "--replay")["replay"]  # no step follows it: the one that leads to it
    assert (replayed["step"], replayed["steps"], replayed["same"]) == (12, [], [True, True])


def test_a_run_that_went_on_from_a_flipped_bit(
    trained: Path, changed: Path, other: Callable[..., Path], diff: Diff
) -> None:
    shutil.rmtree(changed / "snapshots/step-000000012")
    flip(changed, 8)
    found = diff(trained, other(), "--replay")
    assert (found["replay"]["step"], found["replay"]["begin"]) == (9, [8, 8])
    assert found["replay"]["before"] == {"name": WEIGHT, "differ": 1, "of": 112, "only": ""}
    assert (first(found)["outputs"], first(found)["samples"]) == ("transformer.h.1.mlp.c_fc", None)


def test_two_attempts_of_which_one_machine_was_sick(
    changed: Path, other: Callable[..., Path], diff: Diff, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempt 2 computes steps 9 to 12 again, with a bit that flips in step 10."""
    shutil.rmtree(changed / "snapshots/step-000000012")

    def sick(run: Any, step: int) -> Any:
        if step == 9:
            dict(run.compute.model.named_parameters())[WEIGHT].data.view(torch.int32)[3, 5] ^= 1 << 20
        return train_step(run, step)

    with monkeypatch.context() as patched:
        patched.setattr(mingpt.train.loop, "train_step", sick)
        other()
    replayed = diff(changed, "--attempts", "1", "2", "--replay")["replay"]
    assert (replayed["begin"], replayed["step"], replayed["steps"]) == ([8, 8], 10, [])
    assert replayed["same"] == [True, False]


def test_snapshots_of_two_steps_are_compared_only_where_both_are_named(
    trained: Path, changed: Path, diff: Diff
) -> None:
    for step in (4, 8):
        shutil.rmtree(changed / f"snapshots/step-{step:09d}")
    found = diff(f"{trained}@8", changed)
    assert (found["common"], found["snapshot"], found["differs"]) == (0, None, False)
    assert diff(f"{trained}@8", f"{changed}@12")["snapshot"] == [8, 12]


MISTAKES = (
    "a|a a --attempts 1 2|a a/nothing|a@9 a|a --attempts 1 3|a b --replay|a b --a=data.path=x|a@4 b@8 --replay|"
    "a old --replay --a=data.path={text} --b=data.path={text}"
)


@pytest.mark.parametrize("arguments", MISTAKES.split("|"))
def test_mistakes(
    arguments: str, trained: Path, changed: Path, tmp_path: Path, text: Path, capsys: Captured,
    monkeypatch: pytest.MonkeyPatch, told: Told,
) -> None:  # fmt: skip
    """old: of a version whose numerics this one does not have."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "a")
    flip(changed, 8)
    if "old" in arguments:
        changed = changed.rename("old")
        for step in (4, 8, 12):
            manifest = read_manifest(Store("old/snapshots"), step)
            history = [h | {"numerics": h["numerics"] | {"mingpt": 999}} for h in manifest.history]
            path = Path(f"old/snapshots/step-{step:09d}/manifest.json")
            path.write_bytes(encode_manifest(manifest.model_copy(update={"history": history})))
    assert diff_command(arguments.format(text=text).split()) == USER_ERROR
    told(capsys.readouterr().err, text)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "differ", "largest"),
    [
        (torch.float32, [1.0, 2.0], [1.0, 2.0000002384185791], 1, 1),
        (torch.float32, [0.0, 1.0], [-0.0, 1.0], 1, 0),
        (torch.bfloat16, [1.0], [1.0078125], 1, 1),
        (torch.float64, [-1.7976931348623157e308], [1.7976931348623157e308], 1, 2 * 0x7FEFFFFFFFFFFFFF),
        (torch.float32, [float("nan"), 1.0], [1.0, 1.5], 2, 2**22),
        (torch.float32, [float("nan")], [1.0], 1, None),
    ],
)
def test_units_in_the_last_place(
    dtype: torch.dtype, a: list[float], b: list[float], differ: int, largest: int | None
) -> None:
    pair = torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)
    found = measured("w", "", *pair)
    assert (found.differ, found.largest) == (differ, largest)
    assert replace(found, at=None) == replace(measured("w", "", *pair[::-1]), at=None)
